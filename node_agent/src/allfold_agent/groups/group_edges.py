"""The edges of a group on this node: which frames its ops want, and who may open one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.edges.edges import Edges
from allfold_agent.edges.members import GroupLife
from allfold_agent.edges.opening import EdgeRequest, Traffic
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.edges.receivers import NotYet
from allfold_agent.execution.op_edges import OpReceiver
from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.lane.link import LaneDoor
from allfold_agent.p2p.engine import P2PEngine
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import AllfoldError, LocalError, PeerLost, PeerSentIncoherentTensor
from allfold_core.protocol.frames import FrameHeader
from allfold_core.survival.records import Stamp

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)


class GroupEdges:
    """The edges of a group to and from other nodes, over all its epochs.

    The receiver of the edges of ops: decides by its stamp what becomes of each frame.

    Args:
        resources: of this node.

    Attributes:
        ops: the edges that carry the frames of ops.
        p2p: the sends and receives, which have edges of their own.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        plan, members = group.plan, group.members
        self._group = group
        self._members = members
        self._me = resources.node
        self._closing = False
        self._closed = False
        dial, reactor = resources.dial, resources.edge_reactor
        sender = resources.sender(plan)
        self.ops = Edges(plan.group, plan.opening, self._me, members, dial, self, reactor, sender)
        self.p2p = P2PEngine(
            plan,
            self._me,
            members,
            dial,
            resources.workers,
            resources.buffers,
            self.edge_lost,
            reactor,
            sender,
        )

    def serve(self, request: EdgeRequest) -> OutEdge | LaneDoor:
        """Return the out-edge that another node asks for.

        Raises:
            LocalError: this node or the other one is not who the request means.
            PeerLost: the group is closed here.
        """
        self._check(request)
        name = self._group.name
        with self._group.table.lock:
            if self._closed:
                raise PeerLost(
                    f"group '{name}' opening {self._group.opening} is closed on this node"
                )
            if self._members.life_of(request.dst) is None:
                raise PeerLost(f"group '{self._group.name}' goes on without node {request.dst}")
            if request.lane is Traffic.SHORT:
                return self._group.lanes.serve(request)
            if request.lane is Traffic.PAIRS:
                return self.p2p.serve_edge(request.dst)
            return self.ops.out(request.dst)

    def _check(self, request: EdgeRequest) -> None:
        members, here = self._members, (request.src, request.dst)
        if request.src != self._me or request.dst not in members:
            raise LocalError(
                f"group '{self._group.name}' has no edge from {request.src} to {request.dst} on "
                f"node {self._me}",
                http_status=409,
            )
        known = (members.name_of_life(request.src), members.name_of_life(request.dst))
        if all(known) and request.lives != known:
            raise LocalError(
                f"nodes {' and '.join(here)} of group '{self._group.name}' have the lives {known} "
                f"in it, not {request.lives}: one of them was restarted, or has left the group and "
                "come back, which ended its earlier part",
                http_status=409,
            )

    # Frames of ops

    def sink_for(self, source: str, header: FrameHeader) -> OpReceiver | None:
        """Return what a frame goes to; ``None`` where nobody wants it any more.

        Raises:
            NotYet: its op is not run here yet in the attempt that the stamp names.
        """
        group, table = self._group, self._group.table
        with table.lock:
            op = table.in_flight.get(header.seq)
            if op is None or not op.executor or op.packed_stamp != header.stamp:
                if self._closed or group.runs.is_stale(header.seq, header.stamp):
                    return None
                raise NotYet
            receiver = op.receivers.get(source) or group.runs.receiver(op, source)
        if receiver is None:
            stranger = f"op {header.seq} got a frame of node {source}, which has no part in it"
            self.incoherent(header, PeerSentIncoherentTensor(stranger))
        elif receiver.fingerprint != header.fingerprint:
            group.runs.mismatch(header.seq)
        else:
            return receiver
        return None

    def edge_lost(self, source: str, error: AllfoldError) -> None:
        """Nothing more can be received from a node, although it can be reached."""
        with self._group.table.lock:
            if self._closing or self._members.life_of(source) is None:
                return
        log.error("group '%s': %s", self._group.name, error)
        self._group.edge_failed(source, error)

    def incoherent(self, header: FrameHeader, error: AllfoldError) -> None:
        """A frame did not fit its op."""
        log.error("%s", error)
        self._group.runs.cannot_run(header.seq, error, Stamp.unpack(header.stamp))

    # The end

    def drop(self, lives: Collection[GroupLife]) -> None:
        """End the edges to and from nodes without which the group goes on."""
        with self._group.table.lock:
            # First: no new edge to them is served, and the end of one is no failure.
            self._members.dismiss(lives)
            edges = self.ops.detach(lives)
        edges += self.p2p.detach(lives)

        def close() -> None:  # waits for what is under way on the edges
            for edge in edges:
                edge.close()

        start_thread(close, f"allfold-drop-{self._group.name}")

    def close(self, linger: float) -> None:
        """End all edges, after the peers have got what they are still owed.

        Args:
            linger: seconds that they have for it.
        """
        table = self._group.table
        with table.lock:
            if self._closing:
                return
            # First: an edge that ends from here on is no failure.
            self._closing = True
        self.ops.finish(monotonic() + linger)
        self.p2p.finish(monotonic() + linger)
        with table.lock:
            # Only now: until then peers may dial again for what they are owed.
            self._closed = True
        self.ops.close()
        self.p2p.close()
