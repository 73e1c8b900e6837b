"""The epochs of a group on this node: their plans, their compiled ops, their numbers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from allfold_agent.arithmetic.error_feedback import Residuals
from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.edges.edges import DialFrom, Edges, SenderTo
from allfold_agent.execution.op import Arrival, Op, OpOutcomes
from allfold_agent.execution.runner import Runner
from allfold_agent.gpu.gpus import Pins
from allfold_agent.groups.outcomes import ErrorCounts
from allfold_agent.groups.results import ResultRequest, ResultShares
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.runtime.threads import WorkerPool
from allfold_agent.traffic.line import Sender
from allfold_agent.traffic.pacer import Pacer
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.protocol.rank_messages import OpMessage, check_timeout
from allfold_core.protocol.traffic import level_of
from allfold_core.survival import records
from allfold_core.survival.admission import OTHERS
from allfold_core.survival.judge import unpacked
from allfold_core.survival.plans import plan_of
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import Call
from allfold_core.topology import Member

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
        reactor: serves the local ranks, and what nodes agree upon.
        edge_reactor: exchanges frames with other nodes, and folds what they bring.
        pins: memory of the host that GPUs reach.
        fetch: gets the result of an op from one of several addresses, into memory, for as long as
            that is wanted; see :func:`allfold_agent.groups.results.fetch_result`.
        retention: the bound on the results that are kept for other nodes.
        pacer: has caps and classes kept by what is sent to other machines.
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
    edge_reactor: Reactor
    pins: Pins
    fetch: FetchResult
    retention: ResultShares
    pacer: Pacer
    avoid_slow_links: bool = True
    short_lane: bool = True
    lane_thread: LaneThread | None = None
    errors: ErrorCounts = field(default_factory=ErrorCounts)

    def sender(self, plan: Plan) -> SenderTo:
        """Return what gives the sending side of a group, by the zone that it sends to."""
        level = level_of(plan.options.traffic)
        return lambda zone: Sender(self.pacer, plan.group, zone, level)


class GroupEpoch:
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
                self.specs,
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
            "boundary": self.record.boundary if OTHERS in self.record.waiting else 0,
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
        members, boundary = self.plan.world_size, self.record.boundary
        return Op(seq, self.stamp, self.packed_stamp, self.ordinal, members, self.ranks, boundary)

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
        self, session: str, arrival: Arrival, views: Mapping[int, GroupEpoch]
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

    def enter(self, op: Op, views: Mapping[int, GroupEpoch]) -> None:
        """Move an op into this epoch: its calls get the numbers that they have here.

        Args:
            views: by ordinal, the epochs in whose numbers ranks have called.
        """
        if op.stamp == self.stamp and not op.leaving:
            return
        op.stamp, op.packed_stamp, op.ordinal = self.stamp, self.packed_stamp, self.ordinal
        op.participants, op.ranks = self.plan.world_size, self.ranks
        op.boundary = self.record.boundary
        arrivals = {
            self._numbers[session]: self._translated(session, arrival, views)
            for session, arrival in op.calls.items()
            if session in self._numbers
        }
        op.enter(arrivals)

    def _translated(
        self, session: str, arrival: Arrival, views: Mapping[int, GroupEpoch]
    ) -> Arrival:
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


CHANGES_KEPT = 16


class EpochTable:
    """Knows the epochs by stamp and by ordinal. Changed with the lock of the group's ops held.

    Args:
        make: makes the epoch of a record.
        first: the record of the first epoch, which is never forgotten, because ranks begin in the
            group as it was opened. On a node that joins a running group, it is not an epoch of that
            group.
        sessions: those of this node. Each may name the epochs from that of its last call on.

    Attributes:
        by_ordinal: the epochs, the newest last; of those with the same ranks, whose nodes only
            stand in another order, the newest. Replaced as a whole and never changed, so that every
            thread may look through it without the lock.
        changes: the reasons for the latest epochs, the newest last.
    """

    def __init__(
        self,
        make: Callable[[records.Epoch], GroupEpoch],
        first: records.Epoch,
        sessions: Iterable[str],
    ) -> None:
        self._make = make
        self._by_stamp: dict[Stamp, GroupEpoch] = {}
        self._views = dict.fromkeys(sessions, first.ordinal)
        self.by_ordinal: dict[int, GroupEpoch] = {}
        self.changes: deque[str] = deque(maxlen=CHANGES_KEPT)
        self.first = self.take_in(first)

    def take_in(self, record: records.Epoch) -> GroupEpoch:
        """Return the epoch of a record; made where it was not known yet."""
        epoch = self._by_stamp.get(record.stamp)
        if epoch is None:
            epoch = self._by_stamp[record.stamp] = self._make(record)
            known = self.by_ordinal.get(record.ordinal)
            if known is None or known.stamp < record.stamp:
                self.by_ordinal = dict(sorted({**self.by_ordinal, record.ordinal: epoch}.items()))
            if known is None and record.change:
                self.changes.append(unpacked(record.change).message)
        return epoch

    def of(self, stamp: Stamp) -> GroupEpoch:
        """Return the epoch of a stamp that an op has."""
        return self._by_stamp[stamp]

    def newest_with(self, session: str) -> GroupEpoch | None:
        """Return the newest epoch in which a local session has a rank, if there is one."""
        newest_first = reversed(self.by_ordinal.values())
        return next((each for each in newest_first if each.has(session)), None)

    # What can be named

    def note_view(self, session: str, ordinal: int) -> None:
        """A local rank has called as a member of an epoch: it will name no older one."""
        if ordinal > self._views.get(session, ordinal):
            self._views[session] = ordinal

    def view_of(self, session: str) -> int:
        """Return the newest epoch that a local rank is known to be in; -1 for none."""
        return self._views.get(session, -1)

    def session_joined(self, session: str, ordinal: int) -> None:
        """A local rank has joined with an epoch."""
        self._views.setdefault(session, ordinal)

    def session_ended(self, session: str) -> None:
        """A local rank makes no more calls."""
        self._views.pop(session, None)

    def forget_old(self, ops: Iterable[Op], agreed: Collection[Stamp]) -> None:
        """Forget the epochs that no op, no rank's view and no message can name any more.

        Args:
            ops: in flight.
            agreed: the stamps of those that the nodes may still have to decide about.
        """
        newest = next(reversed(self.by_ordinal))
        oldest_view = min(list(self._views.values()), default=newest)
        stamps, views = {*agreed}, {self.first.ordinal}
        for op in ops:
            stamps.add(op.stamp)
            views.add(op.ordinal)
            views.update(arrival.message.view for arrival in op.calls.values())
        named = {
            epoch.ordinal
            for epoch in self._by_stamp.values()
            if epoch.ordinal >= oldest_view or epoch.ordinal in views or epoch.stamp in stamps
        }
        self.by_ordinal = {
            ordinal: epoch for ordinal, epoch in self.by_ordinal.items() if ordinal in named
        }
        stamps.update(epoch.stamp for epoch in self.by_ordinal.values())
        self._by_stamp = {
            stamp: epoch for stamp, epoch in self._by_stamp.items() if stamp in stamps
        }
