"""The edges of a group on this node: which frames its ops want, and who may open one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Protocol

from allfold_agent.edges.edge_request import EdgeRequest, Lane
from allfold_agent.edges.edges import Edges
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.op_receiver import OpReceiver
from allfold_agent.groups.epoch import Epoch, NodeResources
from allfold_agent.groups.op_table import OpTable
from allfold_agent.p2p.engine import P2PEngine
from allfold_core.errors import AllfoldError, LocalError, PeerLost, PeerSentIncoherentTensor
from allfold_core.plan import Member, Plan
from allfold_core.wire.frames import FrameHeader

log = logging.getLogger(__name__)


class OpsOfGroup(Protocol):
    """What the edges have to know of the ops of their group. With the table's lock held."""

    @property
    def name(self) -> str:
        """The group's name."""

    @property
    def table(self) -> OpTable:
        """The ops that are not over."""

    @property
    def epochs(self) -> Mapping[int, Epoch]:
        """By number, the newest last."""

    @property
    def current(self) -> Epoch:
        """The newest epoch."""

    def epoch_of(self, seq: int) -> Epoch:
        """The epoch in which an op runs, or would run if it began now."""

    def is_over(self, seq: int) -> bool:
        """Return True if an op has an outcome here, or can only fail."""

    def suspect(self, seq: int, reason: str) -> None:
        """Have an op judged."""


class GroupEdges:
    """The edges of a group to and from other nodes, over all its epochs.

    The receiver of the edges of ops: decides by its stamp what becomes of each frame.

    Args:
        plan: of the first epoch.
        ops: of the group.
        resources: of this node.
        report_lost: announces that a member of an epoch is lost.

    Attributes:
        members: all nodes of the group by name, those of earlier epochs too.
        ops: the edges that carry the frames of ops.
        p2p: the sends and receives, which have edges of their own.
    """

    def __init__(
        self,
        plan: Plan,
        ops: OpsOfGroup,
        resources: NodeResources,
        report_lost: Callable[[Epoch, PeerLost], None],
    ) -> None:
        self.members: dict[str, Member] = {}
        self.add_members(plan)
        self._group = ops
        self._opening = plan.epoch
        self._me = resources.node
        self._report_lost = report_lost
        self._closing = False
        self._closed = False
        dial, reactor = resources.dial, resources.reactor
        self.ops = Edges(plan.group, plan.epoch, self._me, self.members, dial, self, reactor)
        self.p2p = P2PEngine(
            plan,
            self._me,
            self.members,
            dial,
            resources.workers,
            resources.buffers,
            self.edge_lost,
            reactor,
        )

    def add_members(self, plan: Plan) -> None:
        """Take in the nodes of an epoch."""
        self.members |= {member.node: member for member in plan.members}

    def serve(self, request: EdgeRequest) -> OutEdge:
        """Return the out-edge that another node asks for.

        Raises:
            LocalError: this node or the other one is not who the request means.
            PeerLost: the group is closed here.
        """
        self._check(request)
        with self._group.table.lock:
            if self._closed:
                raise PeerLost(
                    f"group '{self._group.name}' opening {self._opening} is closed on this node"
                )
            if request.lane is Lane.PAIRS:
                return self.p2p.serve_edge(request.dst)
            return self.ops.out(request.dst)

    def _check(self, request: EdgeRequest) -> None:
        own, peer = self.members[self._me], self.members.get(request.dst)
        if request.src != self._me or peer is None:
            raise LocalError(
                f"group '{self._group.name}' has no edge from {request.src} to {request.dst} on "
                f"node {self._me}",
                http_status=409,
            )
        known = (own.incarnation, peer.incarnation)
        if request.incarnations != known:
            raise LocalError(
                f"nodes {request.src} and {request.dst} of group '{self._group.name}' are the "
                f"incarnations {known}, not {request.incarnations}: one of them was restarted, "
                "which ends its part in the group",
                http_status=409,
            )

    # Frames of ops

    def sink_for(self, source: str, header: FrameHeader, seconds: float) -> OpReceiver | None:
        """Return what a frame goes to; ``None`` where nobody wants it any more.

        Raises:
            TimeoutError: its op is not run here yet in the attempt that the stamp names, and has
                not begun within so many seconds.
        """
        table, deadline = self._group.table, monotonic() + seconds
        with table.lock:
            while True:
                op = table.in_flight.get(header.seq)
                if op is not None and op.running and op.stamp == header.stamp:
                    receiver = op.receivers.get(source)
                    break
                if self._closed or self._is_stale(header):
                    return None
                left = deadline - monotonic()
                if left <= 0 or not table.changed.wait(timeout=left):
                    raise TimeoutError
        if receiver is None:
            receiver = self._group.epochs[op.epoch].runner.receiver(op, source)
        if receiver is None:
            stranger = f"op {header.seq} got a frame of node {source}, which has no part in it"
            self.incoherent(header.seq, PeerSentIncoherentTensor(stranger))
        elif receiver.fingerprint != header.fingerprint:
            self._group.suspect(header.seq, "mismatch")
        else:
            return receiver
        return None

    def _is_stale(self, header: FrameHeader) -> bool:
        """Return True for a frame of an attempt that is over here, or was given up.

        One of an attempt that is not known here yet has to wait: the others are ahead.
        """
        ops, seq, stamp = self._group, header.seq, header.stamp
        if stamp > ops.current.stamp:
            return False
        op = ops.table.in_flight.get(seq)
        if op is not None:
            return stamp < op.stamp
        return stamp < ops.epoch_of(seq).stamp or ops.is_over(seq)

    def edge_lost(self, source: str, error: AllfoldError) -> None:
        """An in-edge is gone for good: so is its node, unless its ranks have left in order."""
        ops = self._group
        with ops.table.lock:
            if self._closing:
                return
            needed = {op.epoch for op in ops.table.in_flight.values() if not op.ended}
            epochs = [
                epoch
                for epoch in ops.epochs.values()
                if (epoch is ops.current or epoch.number in needed) and epoch.awaits(source)
            ]
        for epoch in epochs:
            log.warning("group '%s' has lost node %s: %s", ops.name, source, error.message)
            self._report_lost(epoch, epoch.node_lost(source, error.message))

    def incoherent(self, seq: int, error: AllfoldError) -> None:
        """A frame did not fit its op: find out whose fault it is."""
        log.error("%s", error)
        self._group.suspect(seq, f"incoherent: {error.message}")

    # The end

    def close(self, linger: float) -> None:
        """End all edges, after the peers have got what they are still owed.

        Args:
            linger: seconds that they have for it.
        """
        table = self._group.table
        with table.lock:
            if self._closing:
                return
            self._closing = True
        self.ops.finish(monotonic() + linger)
        self.p2p.finish(monotonic() + linger)
        with table.lock:
            self._closed = True
            table.changed.notify_all()
        self.ops.close()
        self.p2p.close()
