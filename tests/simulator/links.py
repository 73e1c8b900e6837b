"""The links between agents, on the network of the simulation.

They stand in for :class:`allfold_agent.membership.links.PeerLinks`, whose sockets they do without:
connections come and go, are refused and fall silent as those would. What a ping and its answer say
is passed on at once where nothing is in their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allfold_agent.membership.link import LinkListener
from allfold_agent.membership.link_connection import Pings
from allfold_agent.membership.links import PING_SECONDS
from allfold_core.protocol.peer_link import Floor, GroupMessage, LinkReader
from allfold_core.survival.suspicion import (
    LONGEST_PATIENCE_SECONDS,
    Observation,
    RecentMaximum,
)
from tests.support.virtual_loop import Process

if TYPE_CHECKING:
    from tests.simulator.world import World

REDIAL_SECONDS = 0.05
LINGER_SECONDS = 5.0
NEVER = float("-inf")


class Connection:
    """A connection between two agents; only the newest one of a pair counts."""

    def __init__(self, one: PeerLinks, other: PeerLinks) -> None:
        self.ends = (one, other)

    def other(self, me: PeerLinks) -> PeerLinks:
        """Return the other end."""
        return self.ends[1] if self.ends[0] is me else self.ends[0]


class _Link:
    """An agent's link to another one."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.users: dict[str, int] = {}  # by incarnation
        self.incarnation = ""
        self.connection: Connection | None = None
        self.pings = Pings()
        self.last_heard = NEVER
        self.silent_since = NEVER
        self.refused = False
        self.is_dialling = False
        self.floors: Sequence[Floor] = ()

    @property
    def is_wanted(self) -> bool:
        return bool(self.users)


class PeerLinks:
    """The links of one agent."""

    def __init__(self, world: World, process: Process, node: str, incarnation: str) -> None:
        self.node, self.incarnation = node, incarnation
        self.process = process
        self.listener: LinkListener = LinkListener()
        self._world = world
        self._links: dict[str, _Link] = {}
        self._lateness = RecentMaximum(LONGEST_PATIENCE_SECONDS)
        self._ping_is_due: float | None = None

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    # What groups and the peer monitor ask

    def want(self, node: str, _: str, incarnation: str) -> None:
        """Have a link to this life of a node, on behalf of one more group."""
        self.process.call(self._want, node, incarnation)

    def unwant(self, node: str, incarnation: str) -> None:
        """Take one :meth:`want` back."""
        self.process.call(self._unwant, node, incarnation)

    def send(self, node: str, message: bytes) -> bool:
        """Send a packed message."""
        (unpacked,) = LinkReader().feed(message)
        assert isinstance(unpacked, GroupMessage)
        return self.send_message(node, unpacked)

    def send_message(self, node: str, message: GroupMessage) -> bool:
        """Send a message; return False where there is no link."""
        link = self._links.get(node)
        if link is None or link.connection is None:
            return False
        self._world.count(message.type)
        peer = link.connection.other(self)
        self._world.network.post(
            self.process, peer.process, peer._receive, self.node, link.connection, message
        )
        return True

    def dial_again(self, node: str) -> None:
        """Dial a second connection to a node that is silent."""
        if node in self._links:
            self._dial(self._links[node])

    def is_up(self, node: str) -> bool:
        """Return True while there is a link to a node."""
        return node in self._links and self._links[node].connection is not None

    def wanted(self) -> list[tuple[str, str]]:
        """Return the nodes that some group wants a link to, with their incarnations."""
        return [(each.node, each.incarnation) for each in self._links.values() if each.is_wanted]

    def is_with(self, node: str, incarnation: str) -> bool:
        """Return False if the link to a node is, or is to be, with another life of it."""
        return node not in self._links or self._links[node].incarnation in ("", incarnation)

    def last_heard(self, node: str) -> float:
        """Return when the last byte came from a node."""
        return self._links[node].last_heard if node in self._links else NEVER

    def floors(self, node: str) -> Sequence[Floor]:
        """Return what the last answer of a node has said of the groups."""
        return self._links[node].floors if node in self._links else ()

    def observe(self, node: str) -> Observation | None:
        """Return what is seen of a node."""
        link = self._links.get(node)
        if link is None:
            return None
        heard = max(link.silent_since, link.last_heard)
        return Observation(heard, link.pings.unanswered, 0.0, self.lag(), link.refused)

    def lag(self) -> float:
        """Return how late this process was at most within the last seconds."""
        now = self._now
        overdue = 0.0 if self._ping_is_due is None else now - self._ping_is_due
        return max(overdue, self._lateness.at(now))

    def renew(self, incarnation: str) -> None:
        """Begin a new life of this agent: all links end."""
        self.incarnation = incarnation
        for link in list(self._links.values()):
            if link.connection is not None:
                self._end(link.connection)

    # The table

    def _link(self, node: str) -> _Link:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = _Link(node)
            if self._ping_is_due is None:
                self._ping_later()
        return link

    def _want(self, node: str, incarnation: str) -> None:
        link = self._link(node)
        link.users[incarnation] = link.users.get(incarnation, 0) + 1
        if link.incarnation != incarnation:
            link.incarnation, link.refused = incarnation, False
            link.silent_since = self._now
            link.pings.begin_anew()
        if not self._is_connected(link):
            self._dial(link)
        else:
            self.listener.on_up(node, incarnation)

    def _is_connected(self, link: _Link) -> bool:
        peer = None if link.connection is None else link.connection.other(self)
        return peer is not None and peer.incarnation == link.incarnation

    def _unwant(self, node: str, incarnation: str) -> None:
        link = self._link(node)
        left = link.users.get(incarnation, 0) - 1
        if left > 0:
            link.users[incarnation] = left
            return
        link.users.pop(incarnation, None)
        if link.users:
            link.incarnation = next(reversed(link.users))
        else:
            self.process.later(LINGER_SECONDS, self._let_go, link)

    def _let_go(self, link: _Link) -> None:
        if not link.is_wanted and link.connection is not None:
            self._end(link.connection)

    # Connections

    def _dial(self, link: _Link) -> None:
        """Try to connect; where nobody answers at all, try again for as long as it is wanted."""
        if link.is_dialling or not link.is_wanted:
            return
        network, peer = self._world.network, self._world.agents.get(link.node)
        link.is_dialling = True
        if not network.joins(self.process.host, link.node):
            self.process.later(REDIAL_SECONDS, self._redial, link)
        elif peer is None or not peer.process.lives or peer.incarnation != link.incarnation:
            delay = 2 * network.delay(self.process.host, link.node)
            self.process.later(delay, self._on_refused, link, link.incarnation)
        elif not peer.process.runs or peer.links is None:
            self.process.later(REDIAL_SECONDS, self._redial, link)
        else:
            connection = Connection(self, peer.links)
            there, links = peer.process, peer.links
            network.post(self.process, there, links._connected, self.node, connection)
            network.post(there, self.process, self._connected, link.node, connection)

    def _redial(self, link: _Link) -> None:
        link.is_dialling = False
        if not self._is_connected(link):
            self._dial(link)

    def _on_refused(self, link: _Link, incarnation: str) -> None:
        link.is_dialling = False
        if link.incarnation == incarnation and link.is_wanted and not self._is_connected(link):
            link.refused = True
            self.listener.on_down(link.node, True)

    def _connected(self, node: str, connection: Connection) -> None:
        peer = connection.other(self)
        link = self._link(node)
        link.is_dialling = False
        if not peer.process.lives:
            return
        link.connection = connection
        link.refused = False
        link.pings.begin_anew()
        link.last_heard = link.silent_since = self._now
        self.listener.on_up(node, peer.incarnation)

    def _end(self, connection: Connection) -> None:
        """End a connection at this end, and at the other one as soon as it hears of it."""
        peer = connection.other(self)
        self._world.network.post(self.process, peer.process, peer.ended, connection)
        self.ended(connection)

    def ended(self, connection: Connection) -> None:
        """The other end has gone."""
        link = self._links.get(connection.other(self).node)
        if link is None or link.connection is not connection:
            return
        link.connection = None
        link.floors = ()
        if link.is_wanted:
            self.listener.on_down(link.node, False)
            self._dial(link)

    def died(self) -> None:
        """Tell all peers that this process is dead, as its kernel does."""
        for link in self._links.values():
            if link.connection is not None:
                peer = link.connection.other(self)
                self._world.network.post(self.process, peer.process, peer.ended, link.connection)

    def _receive(self, node: str, connection: Connection, message: GroupMessage) -> None:
        link = self._links.get(node)
        if link is not None and link.connection is connection:
            link.last_heard = self._now
            self.listener.on_message(node, message)

    # Pings

    def _ping_later(self) -> None:
        self._ping_is_due = self._now + PING_SECONDS
        self.process.later(PING_SECONDS, self._ping)

    def _ping(self) -> None:
        now, due = self._now, self._ping_is_due or 0.0
        self._lateness.note(now, now - due)
        self._ping_later()
        network, host = self._world.network, self.process.host
        for link in self._links.values():
            number = link.pings.next(now)
            if link.connection is None:
                continue
            peer = link.connection.other(self)
            theirs = peer._links.get(self.node)
            is_whole = theirs is not None and theirs.connection is link.connection
            if is_whole and peer.process.runs and network.joins(host, link.node):
                link.pings.note_answer(number, now)
                link.last_heard = now
                assert theirs is not None
                theirs.last_heard = now
                self._exchange(link, peer)

    def _exchange(self, link: _Link, peer: PeerLinks) -> None:
        """Pass on what a ping says, and what its answer says."""
        if progress := self.listener.progress(link.node):
            peer.process.call(peer.listener.on_progress, self.node, progress)
        link.floors = peer.listener.floors(self.node)
        if link.floors:
            self.listener.on_floors(link.node, link.floors)
