"""The links of this agent: one to each other agent that shares a group with it.

A link carries pings, and what the agents of a group agree upon. It is served by the reactor, and
lasts over epochs and groups.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from time import monotonic

from allfold_agent.membership.link import Dial, LinkContext, LinkListener, PeerLink
from allfold_agent.membership.link_connection import LinkConnection
from allfold_agent.membership.link_dialling import Handover, LinkRequest
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.peer_link import Chosen, Floor, Hello, LinkMessage, Ping, Pong
from allfold_core.survival.suspicion import (
    LONGEST_PATIENCE_SECONDS,
    Observation,
    RecentMaximum,
)

log = logging.getLogger(__name__)

PING_SECONDS = 0.1
# From a connection's beginning to the choice.
_HANDSHAKE_SECONDS = 2.0
# A link that nobody here wants any more is kept for so long: the other end may not know yet, and
# the next group of the same nodes opens faster with it.
_LINGER_SECONDS = 5.0


class PeerLinks:
    """The links to other agents.

    Args:
        node: the name of this one.
        incarnation: this life of it.
        reactor: serves the links. :meth:`close` comes after its end.
        dial: opens a connection to an address with a request target; may wait for a second.
        listener: told of what happens; may be set until the first link.
    """

    def __init__(
        self,
        node: str,
        incarnation: str,
        reactor: Reactor,
        dial: Dial,
        listener: LinkListener | None = None,
    ) -> None:
        self._reactor = reactor
        self._handover = Handover(reactor)
        self._context = LinkContext(
            Hello(node, incarnation),
            reactor,
            self._handover,
            dial,
            self._connect,
            listener or LinkListener(),
        )
        self._links: dict[str, PeerLink] = {}
        self._connections: set[LinkConnection] = set()
        self._lateness = RecentMaximum(LONGEST_PATIENCE_SECONDS)
        self._ping_is_due: float | None = None

    # From any thread

    def want(self, node: str, address: str, incarnation: str) -> None:
        """Ask for a link to this life of a node, on behalf of one more group.

        Where others want another life, the node says which of them is the present one.

        Args:
            address: of its data port.
        """
        self._reactor.call(lambda: self._link(node).want(address, incarnation))

    def unwant(self, node: str, incarnation: str) -> None:
        """Take one :meth:`want` back; the last one lets the link go after a while."""
        self._reactor.call(lambda: self._unwant(node, incarnation))

    def send(self, node: str, message: bytes) -> bool:
        """Send a packed message, without waiting.

        Returns:
            False where there is no link. A message that was taken is lost where the connection
            ends before it has gone out: what matters is sent again at ``on_up``.
        """
        link = self._links.get(node)
        connection = None if link is None else link.connection
        return connection is not None and connection.send(message)

    def round_trips(self) -> dict[str, float | None]:
        """Return the seconds to the last answer of each node; ``None`` where there is no link."""
        links = sorted(self._links.copy().items())
        return {node: each.pings.last_delay if each.connection else None for node, each in links}

    def open(self, request: LinkRequest) -> Callable[[socket.socket], None]:
        """Accept a link that a peer opens at the data port; returns the taker of its connection.

        Raises:
            LocalError: the peer looks for another node, or another incarnation of this one.
        """
        request.check(self._context.me.node, self._context.me.incarnation)
        return lambda connected: self._handover.bring(
            connected, lambda: self._connect(connected, b"", "")
        )

    def renew(self, incarnation: str) -> None:
        """Begin a new life of this agent: all links end, and what is said from now on is of it."""
        self._reactor.call(lambda: self._renew(incarnation))

    def close(self) -> None:
        """End all links; the reactor has ended."""
        self._handover.close()
        for connection in self._connections:
            connection.close()
        for link in self._links.values():
            link.join()

    # In the reactor's thread

    @property
    def listener(self) -> LinkListener:
        """The callbacks of the links' user."""
        return self._context.listener

    @listener.setter
    def listener(self, listener: LinkListener) -> None:
        self._context.listener = listener

    def dial_again(self, node: str) -> None:
        """Dial a second connection to a node that is silent; it replaces the first one."""
        if node in self._links:
            self._links[node].dial_again()

    def is_up(self, node: str) -> bool:
        """Return True while there is a link to a node."""
        return node in self._links and self._links[node].connection is not None

    def wanted(self) -> list[tuple[str, str]]:
        """Return the nodes that some group wants a link to, with their incarnations."""
        return [(each.node, each.incarnation) for each in self._links.values() if each.users]

    def is_with(self, node: str, incarnation: str) -> bool:
        """Return False if the link to a node is, or is to be, with another life of it."""
        return node not in self._links or self._links[node].incarnation in ("", incarnation)

    def last_heard(self, node: str) -> float:
        """Return when the last byte came from a node (monotonic); ``-inf`` if none ever did."""
        return self._links[node].last_heard if node in self._links else float("-inf")

    def floors(self, node: str) -> Sequence[Floor]:
        """Return what the last answer of a node to a ping has said of the groups."""
        return self._links[node].floors if node in self._links else ()

    def observe(self, node: str) -> Observation | None:
        """Return what is seen of a node; ``None`` where there is nothing between us."""
        link, now = self._links.get(node), monotonic()
        if link is None:
            return None
        return Observation(
            last_heard=link.silent_since,
            unanswered=link.pings.unanswered,
            worst_pong=link.pings.worst_delay(now),
            own_lag=self.lag(),
            refused=link.refused,
        )

    def lag(self) -> float:
        """Return how late this thread was at most within the last seconds."""
        now = monotonic()
        overdue = 0.0 if self._ping_is_due is None else now - self._ping_is_due
        return max(overdue, self._lateness.at(now))

    # The table

    def _link(self, node: str) -> PeerLink:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = PeerLink(node, self._context)
            if self._ping_is_due is None:
                self._ping_later()
        return link

    def _unwant(self, node: str, incarnation: str) -> None:
        link = self._links[node]
        link.unwant(incarnation)
        if not link.users:
            times = link.times_wanted
            self._reactor.later(_LINGER_SECONDS, lambda: self._let_go(link, times))

    def _let_go(self, link: PeerLink, times_wanted: int) -> None:
        """Close a link that no group has asked for meanwhile."""
        if link.times_wanted != times_wanted:
            return
        if link.connection is not None:
            link.connection.end("no group wants it any more")
        self._drop_if_idle(link)

    def _drop_if_idle(self, link: PeerLink) -> None:
        if not link.users and link.connection is None and self._links.get(link.node) is link:
            del self._links[link.node]

    def _renew(self, incarnation: str) -> None:
        self._context.me = Hello(self._context.me.node, incarnation)
        for connection in list(self._connections):
            connection.end("this agent begins a new life")

    # Connections

    def _connect(self, connected: socket.socket, early: bytes, dialled: str) -> None:
        connection = LinkConnection(connected, self._reactor, self, dialled)
        self._connections.add(connection)
        self._reactor.later(_HANDSHAKE_SECONDS, lambda: self._check(connection))
        try:
            connection.open(self._context.me.pack(), early)
        except Exception as error:  # without an end, the link would never dial again
            log.exception("a connection of a link cannot be served")
            connection.end(str(error))

    def _check(self, connection: LinkConnection) -> None:
        if connection in self._connections and not connection.settled:
            connection.end("it was not chosen in time")

    def on_bytes(self, connection: LinkConnection) -> None:
        if connection.peer is not None:
            self._link(connection.peer.node).last_heard = connection.last_heard

    def on_message(self, connection: LinkConnection, message: LinkMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(connection, message)
            return
        if connection.peer is None:
            connection.end("a message before HELLO")
            return
        link = self._link(connection.peer.node)
        if isinstance(message, Chosen):
            link.on_chosen(connection, message.number)
        elif connection is not link.connection:
            connection.end("a message on a connection that is not the link")
        else:
            self._on_content(link, connection, message)

    def on_end(self, connection: LinkConnection, reason: str) -> None:
        self._connections.discard(connection)
        node = connection.peer.node if connection.peer else connection.dialled
        log.debug("a connection with node %s has ended: %s", node or "?", reason)
        if node in self._links:
            link = self._links[node]
            link.on_end(connection, reason)
            self._drop_if_idle(link)

    def _on_hello(self, connection: LinkConnection, hello: Hello) -> None:
        expected = connection.dialled or hello.node
        if connection.peer or hello.node == self._context.me.node or hello.node != expected:
            connection.end(f"an unexpected HELLO of node {hello.node}")
            return
        connection.peer = hello
        self._link(hello.node).on_hello(connection, hello)

    def _on_content(self, link: PeerLink, connection: LinkConnection, message: LinkMessage) -> None:
        context, listener = self._context, self._context.listener
        if isinstance(message, Ping):
            floors = context.ask(listener.floors, link.node)
            connection.send(Pong(message.number, floors).pack())
            context.tell(listener.on_progress, link.node, message.progress)
        elif isinstance(message, Pong):
            link.pings.note_answer(message.number, monotonic())
            link.floors = message.floors
            context.tell(listener.on_floors, link.node, message.floors)
        else:
            context.tell(listener.on_message, link.node, message)

    # Pings

    def _ping_later(self) -> None:
        self._ping_is_due = monotonic() + PING_SECONDS
        self._reactor.later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        """Ping every peer. Other messages do not take a ping's place: nobody answers them."""
        now, due = monotonic(), self._ping_is_due or 0.0
        self._lateness.note(now, now - due)
        self._ping_is_due = None
        if self._links:
            self._ping_later()
        for link in list(self._links.values()):
            number = link.pings.next(now)
            if link.connection is not None:
                progress = self._context.ask(self._context.listener.progress, link.node)
                link.connection.send(Ping(number, progress).pack())
