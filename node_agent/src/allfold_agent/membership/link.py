"""The link to one other agent: of all connections to it the one that counts, and its redial.

Both ends may dial, and at once. The end whose name is the earlier chooses: a connection is the link
when that end has sent ``CHOSEN`` on it. The other end takes the newest choice.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from allfold_agent.membership.link_connection import LinkConnection
from allfold_agent.membership.link_dialling import (
    Dialled,
    Handover,
    Redial,
    Refusal,
    refusal_of,
)
from allfold_agent.membership.link_request import LinkRequest
from allfold_agent.membership.pings import Pings
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import AllfoldError
from allfold_core.wire.peer_link import Chosen, Floor, GroupMessage, Hello, Progress

log = logging.getLogger(__name__)
T = TypeVar("T")

# The node of the later name dials first; the other one does where it does not come.
_FIRST_WAIT_SECONDS = 0.2

Dial = Callable[[str, str], Dialled]
"""Opens a connection to an address with a request target."""


class LinkListener:
    """Whoever uses the links. Its methods are called in the reactor's thread, and must not wait.

    ``on_up`` and ``on_down`` are about wanted nodes; the others about any that has a link with
    this one, since the peer may have opened a group a moment earlier.
    """

    def on_up(self, node: str, incarnation: str) -> None:
        """There is a link. What was sent earlier may be lost: send again what matters."""

    def on_down(self, node: str, refused: bool) -> None:
        """The link has ended; or, with ``refused``, there will be no new one.

        The second is called when nobody listens at the node's address any more, or another
        incarnation does. That may be after the first one, or without it.
        """

    def on_message(self, node: str, message: GroupMessage) -> None:
        """A message of a group has come; one connection delivers each once, in order."""

    def progress(self, node: str) -> Sequence[Progress]:  # noqa: ARG002
        """Return what a ping to the node is to say."""
        return ()

    def on_progress(self, node: str, progress: Sequence[Progress]) -> None:
        """A ping has said how far the node is."""

    def floors(self, node: str) -> Sequence[Floor]:  # noqa: ARG002
        """Return what an answer to the node's ping is to say."""
        return ()

    def on_floors(self, node: str, floors: Sequence[Floor]) -> None:
        """The answer to a ping has said what the node knows of all."""


@dataclass
class LinkContext:
    """What all links of an agent share.

    Attributes:
        me: this agent.
        dial: opens connections.
        connect: takes a connection over, and what has come on it, for the node that was dialled.
        listener: told of what happens.
        choices: numbers the choices of connections.
    """

    me: Hello
    reactor: Reactor
    handover: Handover
    dial: Dial
    connect: Callable[[socket.socket, bytes, str], None]
    listener: LinkListener
    choices: Iterator[int] = field(default_factory=lambda: count(1))

    def ask(self, method: Callable[[str], Sequence[T]], node: str) -> tuple[T, ...]:
        """Return what a method of the listener knows of a node; nothing where it fails."""
        try:
            return tuple(method(node))
        except Exception:
            log.exception("the content of a ping is not known")
            return ()

    def tell(self, method: Callable[..., object], *facts: Any) -> None:
        """Call a method of the listener; its failure is not the link's."""
        try:
            method(*facts)
        except Exception:
            log.exception("news of a link could not be taken in")


class PeerLink:
    """The link to one node, in the reactor's thread.

    Attributes:
        node: its name.
        users: how many groups want the link.
        connection: the one that is the link at the moment.
        incarnation: the life of the node that is wanted; empty where nobody has told.
        floors: what its last answer to a ping has said of the groups.
        last_heard: when the last byte came from the node (monotonic).
        silent_since: the same; or when the node was first wanted, if that is later.
        refused: True while nobody listens at its address, or somebody else does.
    """

    def __init__(self, node: str, context: LinkContext) -> None:
        self.node = node
        self.users = 0
        self.connection: LinkConnection | None = None
        self.incarnation = ""
        self.pings = Pings()
        self.floors: Sequence[Floor] = ()
        self.last_heard = float("-inf")
        self.refused = False
        self._wanted_at = monotonic()
        self._context = context
        self._address = ""
        self._is_replaced = False
        self._last_choice = 0
        self._dialled_incarnation = ""
        self._dialled_at_silence = float("-inf")
        self._failure = ""  # of the last dial
        self._redial = Redial(self, context.reactor, context.handover)

    # What the groups want

    @property
    def silent_since(self) -> float:
        return max(self.last_heard, self._wanted_at)

    def want(self, address: str, incarnation: str) -> None:
        """One more group has the node among its members, in this life of it."""
        self.users += 1
        self._address = address
        if incarnation != self.incarnation:
            self._expect(incarnation)
        if self.connection is not None:
            if self.users == 1:
                self._tell_up()
            return
        if self.users == 1:
            self._begin_to_wait()
        if self._is_replaced:
            self._is_replaced = self.refused = False
        self._redial.start(_FIRST_WAIT_SECONDS if self._chooses else 0.0)

    def _expect(self, incarnation: str) -> None:
        """Have to do with this life of the node, and with no other one any more."""
        self.incarnation, self._last_choice = incarnation, 0
        self._is_replaced = self.refused = False
        self.last_heard = float("-inf")
        self._begin_to_wait()
        if self.connection is not None:
            self.connection.end("another incarnation is wanted")

    def _begin_to_wait(self) -> None:
        self._wanted_at = monotonic()
        self.pings.begin_anew()

    def dial_again(self) -> None:
        """Dial a second connection, which replaces the present one unless that is heard again."""
        self._dialled_at_silence = self.last_heard
        self._redial.start()

    def join(self) -> None:
        """Wait for the end of a dial that is under way."""
        self._redial.join()

    # What Redial asks for

    def needs_dial(self) -> bool:
        return bool(self.users) and not self._is_replaced and not self._is_well

    def dial(self) -> Dialled:
        self._dialled_incarnation = self.incarnation
        request = LinkRequest(self.node, self._dialled_incarnation)
        return self._context.dial(self._address, request.target)

    def on_dialled(self, dialled: Dialled) -> None:
        if self.needs_dial():
            self._context.connect(*dialled, self.node)
        else:  # the peer was faster
            dialled[0].close()
            self._redial.done()

    def on_not_dialled(self, error: AllfoldError) -> None:
        refusal = refusal_of(error)
        if error.message != self._failure:  # not twenty times a second
            self._failure = error.message
            log.info("there is no link to node %s yet: %s", self.node, error.message)
        # A dial that began before another incarnation was wanted says nothing about that one.
        is_news = self._dialled_incarnation == self.incarnation
        if refusal is not Refusal.NONE and is_news and self.needs_dial():
            self._note_refusal(refusal)
        self._redial.failed()

    # What comes on its connections

    def on_hello(self, connection: LinkConnection, hello: Hello) -> None:
        """A connection has said that it is the node's."""
        if self.incarnation not in ("", hello.incarnation):
            if self.users:
                connection.end("another incarnation is wanted")
                return
            self._last_choice = 0
        self.incarnation = hello.incarnation
        self.last_heard = monotonic()
        if not self._chooses:
            return
        if connection.dialled and self._is_well:
            connection.end("the peer has dialled too, and its connection stays")
            return
        connection.send(Chosen(next(self._context.choices)).pack())
        self._adopt(connection)

    def on_chosen(self, connection: LinkConnection, number: int) -> None:
        """The peer has chosen a connection."""
        if self._chooses or number <= self._last_choice:
            connection.end("a choice that is not the peer's, or an old one")
            return
        self._last_choice = number
        self._adopt(connection)

    def on_end(self, connection: LinkConnection, reason: str) -> None:
        """One of its connections has ended."""
        if connection is self.connection:
            self.connection = None
            if self.users:
                log.info("the link to node %s has ended: %s", self.node, reason)
                self._context.tell(self._context.listener.on_down, self.node, False)
                self._redial.start()
        elif connection.dialled and not connection.settled:
            self._redial.failed()

    @property
    def _chooses(self) -> bool:
        return self._context.me.node < self.node

    @property
    def _is_well(self) -> bool:
        """True while there is a link that has been heard since a second one was asked for."""
        connection = self.connection
        return connection is not None and connection.last_heard > self._dialled_at_silence

    def _adopt(self, connection: LinkConnection) -> None:
        former, self.connection = self.connection, connection
        connection.settled = True
        self.refused = self._is_replaced = False
        self._failure = ""
        self.pings.begin_anew()
        if connection.dialled:
            self._redial.done()
        if former is not None:
            former.end("replaced by a new connection")
        if self.users:
            self._tell_up()

    def _tell_up(self) -> None:
        log.info("there is a link to node %s, incarnation %s", self.node, self.incarnation)
        self._context.tell(self._context.listener.on_up, self.node, self.incarnation)

    def _note_refusal(self, refusal: Refusal) -> None:
        self._is_replaced = refusal is Refusal.REPLACED
        if self.connection is not None:
            self.connection.end("it is silent, and its node refuses another one")
        if not self.refused:
            self.refused = True
            self._context.tell(self._context.listener.on_down, self.node, True)
