"""The link to one other agent: which of the connections to it is used, and how it is redialled.

Both ends may dial, even at the same time. The end whose name comes first chooses: a connection
becomes the link when that end has sent ``CHOSEN`` on it. The other end follows the newest choice.

Groups may want a link to different lives of the other node, because the plan of a group may come
late. The node itself says which life is the present one: by its HELLO, or by refusing a dial meant
for another life.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, NamedTuple, TypeVar

from allfold_agent.membership.link_connection import LinkConnection, Pings
from allfold_agent.membership.link_dialling import (
    Dialled,
    DialRefusal,
    Handover,
    LinkRequest,
    Redial,
    refusal_of,
)
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.protocol.peer_link import Chosen, Floor, GroupMessage, GroupProgress, Hello

log = logging.getLogger(__name__)
T = TypeVar("T")

# The node of the later name dials first; the other one does where it does not come.
_FIRST_WAIT_SECONDS = 0.2

Dial = Callable[[str, str], Dialled]
"""Opens a connection to an address with a request target."""


class LinkListener:
    """The callbacks of the links' user, called in the reactor's thread; they must not block.

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

    def progress(self, node: str) -> Sequence[GroupProgress]:  # noqa: ARG002
        """Return what a ping to the node is to say."""
        return ()

    def on_progress(self, node: str, progress: Sequence[GroupProgress]) -> None:
        """A ping has said how far the node is."""

    def floors(self, node: str) -> Sequence[Floor]:  # noqa: ARG002
        """Return what an answer to the node's ping is to say."""
        return ()

    def on_floors(self, node: str, floors: Sequence[Floor]) -> None:
        """The answer to a ping has said what the node knows of all."""


@dataclass
class LinkContext:
    """The parts that all links of an agent share.

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


class _Life(NamedTuple):
    """A life of the node that groups want."""

    address: str
    users: int


class PeerLink:
    """The link to one node, in the reactor's thread.

    Attributes:
        node: its name.
        connection: the one that is the link at the moment.
        incarnation: the life of the node that is, or is to be, at the other end; empty where nobody
            has told.
        floors: what its last answer to a ping has said of the groups.
        last_heard: when the last byte came from the node (monotonic).
        silent_since: the same; or when the node was first wanted, if that is later.
        refused: True while nobody listens at its address, or somebody else does.
        times_wanted: how often a group has asked for the link.
    """

    def __init__(self, node: str, context: LinkContext) -> None:
        self.node = node
        self.connection: LinkConnection | None = None
        self.incarnation = ""
        self.pings = Pings()
        self.floors: Sequence[Floor] = ()
        self.last_heard = float("-inf")
        self.refused = False
        self.times_wanted = 0
        self._wanted_at = monotonic()
        self._context = context
        # By incarnation, the one that was named last at the end; changed by making another one.
        self._lives: dict[str, _Life] = {}
        self._over: frozenset[str] = frozenset()  # those of them that the node says it is not
        self._met = ""  # the life to which there was a link last
        self._last_choice = 0
        self._dialled_incarnation = ""
        self._dialled_at_silence = float("-inf")
        self._failure = ""  # of the last dial
        self._ended_at: float | None = None
        self._redial = Redial(self, context.reactor, context.handover)

    # What the groups want

    @property
    def silent_since(self) -> float:
        return max(self.last_heard, self._wanted_at)

    @property
    def users(self) -> int:
        """The number of groups that want the link."""
        return sum(life.users for life in self._lives.values())

    def want(self, address: str, incarnation: str) -> None:
        """Add a user of the link: a group with this incarnation of the node among its members."""
        self.times_wanted += 1
        is_first = not self._lives
        if is_first:
            self._ended_at = None  # while nobody wanted it, it was not missed
        others = {each: life for each, life in self._lives.items() if each != incarnation}
        users = self._lives[incarnation].users if incarnation in self._lives else 0
        self._lives = {**others, incarnation: _Life(address, users + 1)}
        if incarnation in self._over:  # it may have begun since
            self._over, self.refused = self._over - {incarnation}, False
        if self.connection is not None and not is_first:
            if self.needs_dial():  # this life may have followed the one at the other end
                self._redial.start()
            return
        self._expect(incarnation)
        if self.connection is not None:
            self._tell_up()
            return
        if is_first:
            self._begin_to_wait()
        self._redial.start(_FIRST_WAIT_SECONDS if self._chooses else 0.0)

    def unwant(self, incarnation: str) -> None:
        """Take one :meth:`want` back."""
        address, users = self._lives[incarnation]
        lives = {**self._lives, incarnation: _Life(address, users - 1)}
        self._lives = {each: life for each, life in lives.items() if life.users}
        self._over = self._over.intersection(self._lives)  # "&" would make a set, which can change
        if self._lives and self.incarnation not in self._lives:
            newest = self._newest
            if newest is None:  # what was refused may be there by now
                self._over, newest = frozenset(), next(reversed(self._lives))
            self._expect(newest)
            self._redial.start()

    @property
    def _newest(self) -> str | None:
        """The life that was named last, of those that are not over. From any thread."""
        over = self._over
        return next((each for each in reversed(self._lives) if each not in over), None)

    def _expect(self, incarnation: str) -> None:
        """Deal with this life of the node from now on, and with no other one."""
        if incarnation == self.incarnation:
            return
        self.incarnation, self._last_choice = incarnation, 0
        self.refused = False
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
        """Return True while a new connection is wanted. From any thread."""
        newest = self._newest
        return newest is not None and (newest != self.incarnation or not self._is_well)

    def dial(self) -> Dialled:
        """Open a connection, in a thread that may wait; ``AllfoldError`` where there is none."""
        lives, newest = self._lives, self._newest
        if newest is None or newest not in lives:
            raise ServiceError(f"no group wants a link to node {self.node} any more")
        self._dialled_incarnation = newest
        request = LinkRequest(self.node, newest)
        return self._context.dial(lives[newest].address, request.target)

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
        if refusal is not DialRefusal.NONE:
            self._take_refusal(refusal, self._dialled_incarnation)
        self._redial.failed()

    def _take_refusal(self, refusal: DialRefusal, incarnation: str) -> None:
        """A dial that was meant for a life of the node was refused."""
        is_present, is_replaced = incarnation == self.incarnation, refusal is DialRefusal.REPLACED
        if incarnation not in self._lives or (is_present and self._is_well):
            return
        if is_replaced and incarnation == self._met:  # what was refused before may have followed it
            self._met, self._over = "", frozenset()
        if is_replaced or not is_present:
            self._over |= {incarnation}
        if not is_present:
            return  # that says nothing about the present one
        if is_replaced and self._newest is not None:
            self._expect(self._newest)
        else:
            self._note_refusal()

    # What comes on its connections

    def on_hello(self, connection: LinkConnection, hello: Hello) -> None:
        """Take in the HELLO of a connection, which names the node and its incarnation."""
        if self.incarnation not in ("", hello.incarnation) and not self._follow(hello.incarnation):
            connection.end("another incarnation is wanted")
            return
        self.incarnation = hello.incarnation
        self.last_heard = monotonic()
        if not self._chooses:
            return
        if connection.dialled and self._is_well:
            connection.end("the peer has dialled too, and its connection stays")
            return
        connection.send(Chosen(next(self._context.choices)).pack())
        self._adopt(connection)

    def _follow(self, incarnation: str) -> bool:
        """Go on with another life of the node, which has spoken, if any group wants it."""
        if not self._lives:
            self._last_choice = 0
            return True
        is_known_over = incarnation in self._over and self.connection is not None
        if incarnation not in self._lives or is_known_over:
            return False
        self._over = (self._over | {self.incarnation}) & self._lives.keys() - {incarnation}
        self._expect(incarnation)
        return True

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
                self._ended_at = monotonic()
                self._context.tell(self._context.listener.on_down, self.node, False)
                if self._newest is not None:
                    self._expect(self._newest)
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
        self.refused, self._met = False, self.incarnation
        self._over -= {self.incarnation}
        self._failure = ""
        self.pings.begin_anew()
        if connection.dialled:
            self._redial.done()
        if former is not None:
            former.end("replaced by a new connection")
        if self.needs_dial():  # a later life may be there
            self._redial.start()
        if self.users:
            again = (
                "" if self._ended_at is None else f", after {monotonic() - self._ended_at:.1f} s"
            )
            log.info(
                "there is a link to node %s, incarnation %s%s", self.node, self.incarnation, again
            )
            self._tell_up()
        self._ended_at = None

    def _tell_up(self) -> None:
        self._context.tell(self._context.listener.on_up, self.node, self.incarnation)

    def _note_refusal(self) -> None:
        if self.connection is not None:
            self.connection.end("it is silent, and its node refuses another one")
        if not self.refused:
            self.refused = True
            self._context.tell(self._context.listener.on_down, self.node, True)
