"""One membership generation of a group on this node: its plan, its compiled ops, its numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from allfold_agent.arithmetic.error_feedback import Residuals
from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.edges.edges import DialFrom, Edges
from allfold_agent.execution.op import Arrival, Op
from allfold_agent.execution.runner import OpOutcomes, Runner
from allfold_agent.gpu.pins import Pins
from allfold_agent.groups.result_request import ResultRequest
from allfold_agent.groups.retention import Retention
from allfold_agent.groups.tally import ErrorCounts
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.survival import records
from allfold_core.survival.admission import OTHERS
from allfold_core.survival.plans import plan_of
from allfold_core.survival.reports import Call
from allfold_core.topology import Member
from allfold_core.wire.local_wire import OpMessage, check_timeout

FetchResult = Callable[
    [Sequence[str], ResultRequest, memoryview, Callable[[], bool], Callable[[], float]], bool
]

log = logging.getLogger(__name__)

LOCAL = "local"
_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources that all groups of a node share.

    Attributes:
        node: its name.
        dial: opens an edge: ``dial(request, address)(from_frame)``.
        reactor: reads the short frames of other nodes.
        pins: memory of the host that GPUs reach.
        fetch: gets the result of an op from one of several addresses, into memory, for as long as
            that is wanted; see :func:`allfold_agent.groups.result_transfer.fetch_result`.
        retention: the bound on the results that are kept for other nodes.
        avoid_slow_links: have nodes stand in another order where a link is slow.
        short_lane: let the ranks of a node do small ops by themselves.
        lane_thread: exchanges these with other nodes; ``None`` to do so in the long lane alone.
        errors: counts the ops that fail.
    """

    node: str
    workers: WorkerPool
    buffers: BufferPool
    dial: DialFrom
    reactor: Reactor
    pins: Pins
    fetch: FetchResult
    retention: Retention
    avoid_slow_links: bool = True
    short_lane: bool = True
    lane_thread: LaneThread | None = None
    errors: ErrorCounts = field(default_factory=ErrorCounts)


class Epoch:
    """The members of a group during one epoch, and all that follows from them.

    Every rank number and node index here is one of this epoch. What lasts longer is a session: one
    rank's registration with the group. A node that has no rank in the epoch runs nothing in it.

    Args:
        opening: the plan with which the group was opened.
        record: what the nodes have agreed on.
        members: all nodes of the group by name.
        edges: of the group, to and from the other nodes.
        ops: told how the attempts of ops go.
        residuals: what lossy wires owe to series of ops.

    Attributes:
        ordinal: how many epochs the group had before: the number of this one for its ranks.
        stamp: of the round that made it; ``packed_stamp`` as frames have it.
        ranks: the numbers of the ranks of this node.
        seats: by rank, the number of its seat, by which messages know it.
    """

    def __init__(
        self,
        opening: Plan,
        record: records.Epoch,
        resources: NodeResources,
        *,
        members: Mapping[str, Member],
        edges: Edges,
        ops: OpOutcomes,
        residuals: Residuals,
    ) -> None:
        self.record = record
        self.ordinal = record.ordinal
        self.stamp = record.stamp
        self.packed_stamp = record.stamp.pack()
        self.plan = plan_of(opening, record, members)
        self.ranks = self.plan.ranks_on(resources.node)
        self.seats = tuple(seat.number for seat in record.seats)
        self._numbers = {
            seat.session: rank
            for rank, seat in enumerate(record.seats)
            if seat.node == resources.node
        }
        self._runner: Runner | None = None
        self.call_of = lru_cache(maxsize=_REMEMBERED)(self._call_of)
        """``call_of(spec)``: a call as the agreement knows it, of a rank with this view."""
        if self.ranks:
            me = self.plan.index_of_node(resources.node)
            self.specs = OpSpecs(self.plan, me)
            self._runner = Runner(
                self.plan,
                me,
                self.stamp,
                resources.workers,
                resources.buffers,
                edges,
                ops,
                resources.pins,
                residuals,
            )

    @property
    def runner(self) -> Runner:
        """Runs the ops of this epoch."""
        assert self._runner is not None
        return self._runner

    # Local ranks

    def has(self, session: str) -> bool:
        """Return True if a local session has a rank number here."""
        return session in self._numbers

    def rank_of(self, session: str) -> int:
        """The rank number of a local session; ``InvalidArgument`` if it has none."""
        rank = self._numbers.get(session)
        if rank is None:
            raise InvalidArgument(
                f"the caller is not a rank of epoch {self.ordinal} of group '{self.plan.group}'"
            )
        return rank

    def view(self, session: str) -> dict[str, Any]:
        """The epoch as a rank sees it: its numbers, and the size of the group."""
        return {
            "epoch": self.ordinal,
            "rank": self.rank_of(session),
            "world_size": self.plan.world_size,
            "edge": self.record.edge if OTHERS in self.record.waiting else 0,
            "nodes": len(self.plan.members),
        }

    def explain(self, kind: str, nbytes: int) -> str:
        """The strategy that is chosen for an op of a size; ``InvalidArgument`` for no kind."""
        found = next((each for each in Kind if each.label == kind), None)
        if found is None:
            known = ", ".join(each.label for each in Kind)
            raise InvalidArgument(f"{kind!r} is no collective; there are {known}")
        return LOCAL if len(self.plan.members) == 1 else choose(found, self.plan, nbytes)

    # Calls

    def new_op(self, seq: int) -> Op:
        """An op that would run in this epoch."""
        members = self.plan.world_size
        edge = self.record.edge
        return Op(seq, self.stamp, self.packed_stamp, self.ordinal, members, self.ranks, edge)

    def spec_of(self, message: OpMessage) -> OpSpec:
        """The spec of a local rank's call; ``ValueError`` says what is wrong with it."""
        check_timeout(message.timeout)
        spec = self.specs.of(message.fingerprint)
        itemsize = spec.itemsize
        if message.source.offset % itemsize or message.target.offset % itemsize:
            raise InvalidArgument(
                f"a {spec.fingerprint.dtype.label} cannot lie at byte "
                f"{message.source.offset} or {message.target.offset}"
            )
        return spec

    def _call_of(self, spec: OpSpec) -> Call:
        fingerprint = spec.fingerprint
        root = self.plan.sessions[fingerprint.root] if fingerprint.kind.has_root else ""
        return Call(self.ordinal, fingerprint, root)

    def translated(
        self, session: str, arrival: Arrival, views: Mapping[int, Epoch]
    ) -> Arrival | None:
        """Return a call with the numbers of this epoch; ``None`` if the op cannot be done in it.

        Args:
            views: by ordinal, the epochs in whose numbers ranks have called.
        """
        if session not in self._numbers:
            return None
        try:
            return self._translated(session, arrival, views)
        except ValueError as error:  # a round will say so to all
            log.info("op %d of group '%s': %s", arrival.message.seq, self.plan.group, error)
            return None

    def enter(self, op: Op, views: Mapping[int, Epoch]) -> None:
        """Have an op run in this epoch: its calls get the numbers that they have here.

        Args:
            views: by ordinal, the epochs in whose numbers ranks have called.
        """
        if op.stamp == self.stamp and not op.leaving:
            return
        op.stamp, op.packed_stamp, op.ordinal = self.stamp, self.packed_stamp, self.ordinal
        op.participants, op.ranks, op.edge = self.plan.world_size, self.ranks, self.record.edge
        arrivals = {
            self._numbers[session]: self._translated(session, arrival, views)
            for session, arrival in op.calls.items()
            if session in self._numbers
        }
        op.enter(arrivals)

    def _translated(self, session: str, arrival: Arrival, views: Mapping[int, Epoch]) -> Arrival:
        view = arrival.message.view
        if view == self.ordinal:
            # The epoch that was asked about the call may have had its nodes in another order.
            spec = self.specs.of(arrival.spec.packed)
            return arrival if spec is arrival.spec else replace(arrival, spec=spec)
        fingerprint = arrival.spec.fingerprint
        if fingerprint.kind.has_root:
            root = self.plan.sessions.index(views[view].plan.sessions[fingerprint.root])
            fingerprint = replace(fingerprint, root=root)
        spec = self.specs.of(fingerprint.pack())
        return replace(arrival, rank=self._numbers[session], spec=spec)
