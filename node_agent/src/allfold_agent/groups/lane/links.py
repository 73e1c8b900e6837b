"""The connections of a group's short lane to all other nodes, over its epochs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterator
from functools import partial
from threading import Event

from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.edges import DialFrom, SenderTo
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.members import GroupLife, GroupNodes
from allfold_agent.edges.opening import EdgeOpener, EdgeRequest, Traffic
from allfold_agent.groups.lane.link import FrameSink, LaneDoor, LaneLink
from allfold_agent.groups.lane.payloads import Payloads
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.errors import AllfoldError, PeerLost

log = logging.getLogger(__name__)


class LaneLinks:
    """One link per other node and life. Changed in the lane's thread, but for :meth:`serve`.

    Args:
        group: its name.
        opening: tells this opening of that name from others.
        me: the name of this node.
        members: all nodes of the group.
        sink: takes the frames that come.
        on_change: told when a link is whole, or broken.
        sender: has what they send paced, by the zone of the other node.
    """

    def __init__(
        self,
        group: str,
        opening: int,
        me: str,
        members: GroupNodes,
        dial: DialFrom,
        thread: LaneThread,
        sink: FrameSink,
        on_change: Callable[[], None],
        sender: SenderTo,
    ) -> None:
        self._group, self._opening, self._me = group, opening, me
        self._members = members
        self._dial = dial
        self._thread = thread
        self._sink = sink
        self._payloads = Payloads()
        self._on_change = on_change
        self._sender = sender
        self._links: dict[GroupLife, LaneLink] = {}
        self._dialling: dict[GroupLife, Event] = {}
        self._closed = False

    def are_whole(self, nodes: Collection[str]) -> bool:
        """Return True if there are links to all these nodes. From any thread."""
        links = self._links
        lives = (self._members.life_of(node) for node in nodes)
        return all(life in links and links[life].is_whole for life in lives if life is not None)

    def link_to(self, node: str) -> LaneLink | None:
        """Return the link to a node; ``None`` if the group goes on without it."""
        life = self._members.life_of(node)
        return None if life is None else self._links.get(life)

    # In the lane's thread

    @property
    def have_sent(self) -> bool:
        """True unless something waits for room in a connection."""
        return all(link.has_sent for link in self._links.values())

    def let_go(self) -> None:
        """Use no memory any more that others have given, or will."""
        for link in self._links.values():
            link.let_go()

    def rest(self) -> None:
        """Let go of memory that is not in use."""
        self._payloads.clear()

    def free(self, payload: memoryview | bytearray) -> None:
        """Take a payload back that nobody needs any more."""
        self._payloads.give_back(payload)

    # From any thread, but for what has a thread's name in it

    def want(self, nodes: Collection[str]) -> None:
        """Make links to these nodes, and end the others. From any thread."""
        self._thread.call(partial(self._want, nodes))

    def _want(self, nodes: Collection[str]) -> None:
        wanted = {life for node in nodes if (life := self._members.life_of(node)) is not None}
        for life in [each for each in self._links if each not in wanted]:
            self._end(life)
        for life in wanted:
            self._link(life)
            if life not in self._dialling and not self._closed:
                self._open(life)

    def _link(self, life: GroupLife) -> LaneLink:
        link = self._links.get(life)
        if link is None:
            broken, sender = partial(self._broken, life), self._sender(self._members[life[0]].zone)
            link = self._links[life] = LaneLink(
                life[0], self._thread, self._sink, self._payloads, broken, sender
            )
        return link

    def _open(self, life: GroupLife) -> None:
        """Dial a node."""
        node, closed = life[0], Event()
        lives = (self._members.name_of_life(node), self._members.name_of_life(self._me))
        request = EdgeRequest(
            self._group, self._opening, node, self._me, lane=Traffic.SHORT, lives=lives
        )
        dial = self._dial(request, self._members[node].data_address)
        opener = EdgeOpener(f"{self._group}-{node}-{self._me}-short", dial, closed)
        take, give_up = partial(self._take_in, life), partial(self._give_up, life, closed)
        opener.open_in_thread(0, self._thread, take, give_up)
        self._dialling[life] = closed  # not where there was no thread: the next wish tries again

    def _give_up(self, life: GroupLife, closed: Event, error: AllfoldError) -> None:
        """The next wish for the link dials anew."""
        log.info("group '%s' has no short lane to node %s: %s", self._group, life[0], error)
        if self._dialling.get(life) is closed:
            del self._dialling[life]

    def _take_in(self, life: GroupLife, connected: socket.socket, early: bytes) -> None:
        if life not in self._links:
            connected.close()
            return
        self._links[life].take_in(connected, early)
        self._on_change()

    def serve(self, request: EdgeRequest) -> LaneDoor:
        """Return the door for a connection that another node opens. From any thread.

        Raises:
            PeerLost: the group goes on without that node.
        """
        life = self._members.life_of(request.dst)
        if life is None or self._closed:
            raise PeerLost(f"group '{self._group}' has no short lane to node {request.dst}")
        return LaneDoor(lambda connected: self._thread.call(partial(self._take, life, connected)))

    def _take(self, life: GroupLife, connected: socket.socket) -> None:
        if self._closed:
            connected.close()
            return
        self._link(life).take_out(connected)
        self._on_change()

    def _broken(self, life: GroupLife) -> None:
        """A connection has ended: the next opening of the lane needs another one."""
        self._end(life)
        # Last: it looks if all links are whole.
        self._on_change()

    def _end(self, life: GroupLife) -> None:
        if (event := self._dialling.pop(life, None)) is not None:
            event.set()
        if (link := self._links.pop(life, None)) is not None:
            link.close()

    def close(self) -> None:
        """End all connections. From any thread."""
        # First: until the lane's thread comes to _close, it dials no node and takes none in.
        self._closed = True
        for event in list(self._dialling.values()):
            event.set()
        self._thread.call(self._close)

    def _close(self) -> None:
        for life in list(self._links):
            self._end(life)

    def sending(self) -> list[tuple[str, socket.socket]]:
        """Return the connections on which this node sends, with the node at the other end."""
        found = ((node, link.sending) for (node, _), link in list(self._links.items()))
        return [(node, connected) for node, connected in found if connected is not None]

    def rates(self) -> dict[str, LinkRate]:
        """The rate at which payloads come from each node. From any thread."""
        return {node: link.rate for (node, _), link in list(self._links.items())}

    def counters(self) -> Iterator[tuple[str, str, EdgeCounters]]:
        """The traffic of each link: direction, peer and counters. From any thread."""
        for (node, _), link in list(self._links.items()):
            yield "out", node, link.sent
            yield "in", node, link.received
