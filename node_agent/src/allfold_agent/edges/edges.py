"""All edges of one lane of a group on this node, opened when they are first needed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from itertools import chain

from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.members import GroupLife, GroupNodes
from allfold_agent.edges.opening import Dial, EdgeRequest, Traffic
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.edges.receivers import Receiver
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.traffic.line import Sender

DialFrom = Callable[[EdgeRequest, str], Dial]
"""Makes the function that opens an edge: ``dial(request, address)(from_frame)``."""

SenderTo = Callable[[str], Sender]
"""Returns the sending side of a group towards a zone."""


class Edges:
    """The out-edges and in-edges of this node, one of each per other node of the group.

    They last as long as a node is in the group, over all its epochs, so they are known by the lives
    of nodes. Their owner's lock protects opening them.

    Args:
        group: its name.
        opening: tells this opening of that name from others.
        me: the name of this node.
        members: all nodes of the group; this one among them.
        dial: opens edges.
        receiver: what the in-edges deliver to.
        reactor: exchanges their frames.
        sender: has what they send paced, by the zone of the other node.
    """

    def __init__(
        self,
        group: str,
        opening: int,
        me: str,
        members: GroupNodes,
        dial: DialFrom,
        receiver: Receiver,
        reactor: Reactor,
        sender: SenderTo,
        lane: Traffic = Traffic.OPS,
    ) -> None:
        self._group = group
        self._opening = opening
        self._me = me
        self._members = members
        self._dial = dial
        self._receiver = receiver
        self._reactor = reactor
        self._sender = sender
        self._lane = lane
        self._out: dict[str, OutEdge] = {}
        self._in: dict[str, InEdge] = {}
        self._lives: dict[str, GroupLife | None] = {}  # for which there are edges
        self._over: dict[GroupLife, list[OutEdge | InEdge]] = {}

    def out(self, destination: str) -> OutEdge:
        """The edge to a node."""
        self._set_aside_edges_of_earlier_life(destination)
        edge = self._out.get(destination)
        if edge is None:
            sender = self._sender(self._members[destination].zone)
            edge = self._out[destination] = OutEdge(destination, self._reactor, sender)
        return edge

    def _name(self, source: str, destination: str) -> str:
        lane = "" if self._lane is Traffic.OPS else f"-{self._lane.value}"
        return f"{self._group}-{source}-{destination}{lane}"

    def kick(self, destination: str) -> None:
        """Look for frames to a node that have become ready, and send them."""
        self._out[destination].kick()

    def wake(self, destination: str) -> None:
        """Have the reactor look for frames to a node: an op has failed, and later ones go on."""
        self._out[destination].wake()

    def open_in(self, source: str) -> InEdge:
        """Return the edge from a node, which begins to receive if it has not begun yet.

        Raises:
            ServiceError: no thread can be started for it. The next call tries again.
        """
        self._set_aside_edges_of_earlier_life(source)
        edge = self._in.get(source)
        if edge is None:
            lives = (self._members.name_of_life(source), self._members.name_of_life(self._me))
            request = EdgeRequest(
                self._group,
                self._opening,
                source,
                self._me,
                lane=self._lane,
                lives=lives,
            )
            dial = self._dial(request, self._members[source].data_address)
            name = self._name(source, self._me)
            edge = self._in[source] = InEdge(source, name, dial, self._receiver, self._reactor)
        return edge

    def _set_aside_edges_of_earlier_life(self, node: str) -> None:
        """Set the edges of a node that has come back aside, to be closed; it gets new ones."""
        life = self._members.life_of(node)
        before = self._lives.setdefault(node, life)
        if before is not None and life is not None and before != life:
            edges = [self._out.pop(node, None), self._in.pop(node, None)]
            self._over.setdefault(before, []).extend(each for each in edges if each is not None)
            self._lives[node] = life

    def resume_all(self) -> None:
        """Receive again on all edges that waited for an op, because one has begun or failed."""
        for edge in list(self._in.values()):
            edge.resume()

    def frames_moved(self, node: str) -> int:
        """Return the frames that a node has acknowledged, and those that have come from it."""
        out, in_ = self._out.get(node), self._in.get(node)
        return (out.acknowledged() if out else 0) + (in_.received if in_ else 0)

    def last_heard(self, node: str) -> float:
        """Return when the last byte came from a node on its edges (monotonic)."""
        out, in_ = self._out.get(node), self._in.get(node)
        return max(
            out.last_heard() if out else float("-inf"),
            in_.last_heard if in_ else float("-inf"),
        )

    def rates(self) -> Mapping[str, LinkRate]:
        """By node, how fast it sends to this one."""
        return {node: edge.rate for node, edge in list(self._in.items())}

    def sending(self) -> list[tuple[str, socket.socket]]:
        """Return the open connections on which this node sends, with the node at the other end."""
        found = ((peer, edge.connected) for peer, edge in list(self._out.items()))
        return [(peer, connected) for peer, connected in found if connected is not None]

    def counters(self) -> list[tuple[str, str, EdgeCounters]]:
        """(direction, peer, traffic) of every edge."""
        out = [("out", peer, edge.counters) for peer, edge in list(self._out.items())]
        return out + [("in", peer, edge.counters) for peer, edge in list(self._in.items())]

    def finish(self, deadline: float) -> None:
        """Wait until peers have what was sent to them, or ``deadline`` (monotonic)."""
        for edge in list(self._out.values()):
            edge.finish(deadline)

    def detach(self, lives: Collection[GroupLife]) -> list[OutEdge | InEdge]:
        """Return the edges to and from some lives of nodes, to be closed without the lock."""
        detached: list[OutEdge | InEdge] = []
        for life in lives:
            detached += self._over.pop(life, [])
            if self._lives.get(life[0]) == life:
                detached += self._of(life[0])
        return detached

    def _of(self, node: str) -> list[OutEdge | InEdge]:
        edges = [self._out.get(node), self._in.get(node)]
        return [edge for edge in edges if edge is not None]

    def close(self) -> None:
        """End all edges."""
        over = chain.from_iterable(self._over.values())
        for edge in [*self._out.values(), *self._in.values(), *over]:
            edge.close()
