"""All edges of one lane of a group on this node, opened when they are first needed."""

from __future__ import annotations

from collections.abc import Callable

from allfold_agent.edges.connection import EdgeCounters
from allfold_agent.edges.edge_request import Lane
from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.opening import Dial
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.http.receivers import Receiver
from allfold_agent.runtime.reactor import Reactor
from allfold_core.plan import Plan

DialFrom = Callable[[Plan, int, int, Lane], Dial]


class Edges:
    """The out-edges and in-edges of node ``me``; their owner's lock protects opening them.

    Args:
        dial: opens an edge: ``dial(plan, source, destination, lane)(from_frame)``.
        receiver: what the in-edges deliver to.
        reactor: reads their short frames.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        dial: DialFrom,
        receiver: Receiver,
        reactor: Reactor,
        lane: Lane = Lane.OPS,
    ) -> None:
        self._lane = lane
        self._plan = plan
        self._me = me
        self._dial = dial
        self._receiver = receiver
        self._reactor = reactor
        self._out: dict[int, OutEdge] = {}
        self._in: dict[int, InEdge] = {}

    def out(self, destination: int) -> OutEdge:
        """The edge to a node; ``ServiceError`` where a new one cannot get a thread."""
        edge = self._out.get(destination)
        if edge is None:
            name = self._name(self._me, destination)
            edge = self._out[destination] = OutEdge(destination, self._plan.epoch, name)
        return edge

    def _name(self, source: int, destination: int) -> str:
        lane = "" if self._lane is Lane.OPS else f"-{self._lane.value}"
        return f"{self._plan.group}-{source}-{destination}{lane}"

    def kick(self, destination: int) -> None:
        """Something for a node may have become ready."""
        self._out[destination].kick()

    def wake(self, destination: int) -> None:
        """An op has failed; later ones may go on."""
        self._out[destination].wake()

    def open_in(self, source: int) -> None:
        """Begin to receive from a node, if this has not happened yet.

        Raises:
            ServiceError: no thread can be started for it. The next call tries again.
        """
        if source not in self._in:
            name = self._name(source, self._me)
            dial = self._dial(self._plan, source, self._me, self._lane)
            self._in[source] = InEdge(
                source, self._plan.epoch, name, dial, self._receiver, self._reactor
            )

    def resume(self, source: int) -> None:
        """A frame of a node that had to wait may go on."""
        self._in[source].resume()

    def resume_all(self) -> None:
        """An op has begun or failed: frames of it, and those behind them, may go on."""
        for edge in list(self._in.values()):
            edge.resume()

    def frames_moved(self, node: int) -> int:
        """Return the frames that a node has acknowledged, and those that have come from it."""
        out, in_ = self._out.get(node), self._in.get(node)
        return (out.acknowledged() if out else 0) + (in_.received if in_ else 0)

    def counters(self) -> list[tuple[str, int, EdgeCounters]]:
        """(direction, peer, traffic) of every edge."""
        out = [("out", peer, edge.counters) for peer, edge in list(self._out.items())]
        return out + [("in", peer, edge.counters) for peer, edge in list(self._in.items())]

    def finish(self, deadline: float) -> None:
        """Let peers get what they are owed, until ``deadline`` (monotonic)."""
        for edge in list(self._out.values()):
            edge.finish(deadline)

    def close(self) -> None:
        """End all edges."""
        for out_edge in list(self._out.values()):
            out_edge.close()
        for in_edge in list(self._in.values()):
            in_edge.close()
