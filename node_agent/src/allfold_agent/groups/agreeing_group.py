"""A group on this node as all its nodes agree upon it: carries out decisions, in all epochs."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from allfold_agent.arithmetic.error_feedback import Residuals
from allfold_agent.edges.members import GroupNodes, lives_of
from allfold_agent.execution.op import RankEndpoint
from allfold_agent.execution.result_writer import ResultWriter
from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.epoch import Epoch, EpochTable, NodeResources
from allfold_agent.groups.event_queue import EventQueue
from allfold_agent.groups.fetches import Fetches
from allfold_agent.groups.group_edges import GroupEdges
from allfold_agent.groups.lane_keeper import LaneKeeper
from allfold_agent.groups.link_watch import describe_layout
from allfold_agent.groups.local_ranks import Admitted, GoOn, LocalRanks
from allfold_agent.groups.lost_ranks import LostRanks
from allfold_agent.groups.neighbours import Neighbours, NodeChanges
from allfold_agent.groups.op_attempts import OpAttempts
from allfold_agent.groups.op_runs import OpRuns
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.outcomes import Outcomes, evicted
from allfold_agent.groups.results import Results
from allfold_agent.groups.term_record import record_of, with_seats
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.plan import Plan
from allfold_core.protocol.peer_link import GroupMessage, LinkMessageType
from allfold_core.protocol.rank_messages import OpMessage
from allfold_core.survival import codec, records
from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Evicted,
    Fetch,
    HandOut,
    Installed,
    Instruction,
    LeaveEdge,
    OpenLane,
    Refuse,
    RefuseCalls,
    Release,
    Start,
)
from allfold_core.survival.plans import first_epoch, first_record
from allfold_core.survival.policy import GroupPolicy
from allfold_core.survival.records import NO_EPOCH, Term

log = logging.getLogger(__name__)


class AgreeingGroup(OpAttempts):
    """The ops and members of a group on this node, as all its nodes agree upon them.

    What is done with an op, and in which epoch, the nodes agree upon (:class:`Agreement`). Every
    event goes there under the lock of ``table``; what follows and takes time is done afterwards.

    Args:
        plan: the plan of its opening; on a node that joins it while it runs, see
            :func:`~allfold_core.survival.plans.joining_plan`.
        resources: of this node.
        neighbours: the other nodes.
        joins: the record of the term that has let this node in, where the group runs already.

    Attributes:
        opening: tells this opening of the name from others: the number of its first term.
        p2p: the sends and receives, which know ranks by their numbers in the first epoch.
        record: of the newest term, as the orchestrator keeps it; it may lose it.
        lost_before: the nodes that the group had lost when this one came, each with how.
        hindrances: what is known of why ranks are late; errors quote it.
        deferred: (session, seq) of calls that wait for the GPU of their rank, and have not arrived.
    """

    def __init__(
        self,
        plan: Plan,
        resources: NodeResources,
        neighbours: Neighbours,
        joins: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = plan.group
        self.opening = plan.epoch
        self.plan = plan
        self.node = resources.node
        self.table = OpTable()
        self.outcomes = Outcomes(self.name, self.node, self.table, resources.errors)
        self.results = Results(self.table, resources.retention)
        self.deferred: set[tuple[str, int]] = set()
        self.evicted: PeerLost | None = None
        self._is_over_elsewhere = False
        self.record: Mapping[str, Any] = first_record(plan) if joins is None else joins
        self._resources = resources
        self._neighbours = neighbours
        term = codec.term_of_record(self.record)
        self.lost_before = frozenset(term.lost)
        first = NO_EPOCH if joins else first_epoch(plan)
        self.members = GroupNodes(plan.members, term)
        self._residuals = Residuals()
        self._edges = GroupEdges(
            plan, self.members, self, resources, lambda request: self.lanes.serve(request)
        )
        self.edges, self.p2p, self.serve_edge = self._edges.ops, self._edges.p2p, self._edges.serve
        writer = ResultWriter(resources.workers, self)
        fetches = Fetches(plan, self.members, resources, self)
        self._events = EventQueue(self.name, self.table)
        self.event = self._events.run
        self._runs = OpRuns(
            self.table, self.outcomes, self.results, writer, fetches, self._events, self
        )
        self._for_every_op: dict[type, Callable[[Any], None]] = {
            Start: self._runs.start,
            HandOut: self._runs.hand_out,
            Release: self._release,
        }
        self._lost_ranks = LostRanks(plan, self.p2p)
        self._ranks = LocalRanks(first.sessions_on(self.node), self._events.add_due)
        self._node_changes = NodeChanges(
            partial(neighbours.joined, self), partial(neighbours.left_out, self), self._edges.drop
        )
        self.epoch_table = EpochTable(self._make_epoch, first, self._ranks.sessions)
        self.current = self.epoch_table.first
        self.hindrances = Hindrances()
        policy = GroupPolicy(plan.group, plan.options)
        self.agreement = Agreement(self.node, policy, term, first, self, self.send, self.hindrances)
        self.lanes = LaneKeeper(self, plan, self.members, resources)
        self.outcomes.on_idle = self.lanes.consider_opening
        self.lanes.on_advance = self._runs.begin_waiting
        self.lanes.entered(self.current)

    def begin(self) -> None:
        """Take part in the group, where this node has joined it while it runs."""
        self.event(self.agreement.begin)

    # Epochs

    def _make_epoch(self, record: records.Epoch) -> Epoch:
        return Epoch(
            self.plan,
            record,
            self._resources,
            members=self.members,
            edges=self.edges,
            ops=self,
            residuals=self._residuals,
        )

    @property
    def epochs(self) -> Mapping[int, Epoch]:
        """The epochs by ordinal, the newest last; a mapping that is never changed."""
        return self.epoch_table.by_ordinal

    def _epoch_of(self, seq: int) -> Epoch:
        """The epoch in which an op without calls is to be run."""
        entry = self.agreement.machine.ops.get(seq)
        stamp = entry.stamp if entry is not None else None
        return self.current if stamp is None else self.epoch_table.of(stamp)

    @property
    def is_empty(self) -> bool:
        """True once every rank of this node has left or is dead."""
        return self._ranks.have_ended

    # The short lane

    @property
    @abstractmethod
    def submitted(self) -> Mapping[str, int]:
        """By session, the last op whose message was taken in."""

    @property
    @abstractmethod
    def read(self) -> Mapping[str, int]:
        """By session, the op up to which all messages were taken in, or refused."""

    @abstractmethod
    def submit(
        self,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None = None,
        *,
        posted: bool = False,
    ) -> None:
        """Take in a local rank's call; the op starts with the last one."""

    def may_begin(self, seq: int) -> bool:
        """Return False while an earlier op may yet have to begin on this node.

        That may be one that the ranks have posted to the short lane: it is theirs at first, and
        then it is in what the agreement has left to do.
        """
        return not self.agreement.is_busy and self.lanes.may_begin(seq)

    def close_lane(self) -> None:
        """Let all that the ranks do by themselves be ops of the agreement."""
        self.lanes.close()

    # Events

    def send(self, node: str, kind: LinkMessageType, body: dict[str, Any]) -> None:
        """Send another node a message, which is lost if the link to it is down."""
        self._neighbours.send(node, GroupMessage(kind, self.name, self.opening, body))

    def receive(self, node: str, message: GroupMessage) -> None:
        """Take in a message of another node; ``FrameError`` where it is none."""
        if message.type is LinkMessageType.CLOSED:
            self._closed_elsewhere(node, all_left=codec.unpack_closed(message.body))
        else:
            self._tell(partial(self.agreement.receive, node, message.type, message.body))

    def _closed_elsewhere(self, node: str, *, all_left: bool) -> None:
        """The group is over on another node.

        A node that was left out says nothing about the others: they may go on with this one, even
        if it has no rank at the moment. The orchestrator tells this node if it is left out, too.
        """
        log.info("group '%s' is over on node %s", self.name, node)
        if all_left:
            self.event(self._end_without_ranks)

    def link_up(self, node: str) -> None:
        """Send a node what it may have missed, as its link is up."""
        self._tell(partial(self.agreement.link_up, node))

    def registers(self) -> Mapping[str, Any]:
        """Return the record of the newest term: no other is taken until :meth:`registered`."""
        with self.table.lock:
            self.agreement.registers()
            epoch = self.agreement.machine.epoch
            return with_seats(self.record, epoch, self.node, self._ranks.present)

    def registered(self, generation: int) -> None:
        """Note the store's generation: terms that older ones announced are refused from now on."""
        self._tell(partial(self.agreement.registered, generation))

    def take_term(self, record: Mapping[str, Any], announced: int) -> None:
        """Take in the announced record of a term; ``FrameError`` if it is not valid.

        Args:
            announced: the generation of the store that has announced it.
        """
        term = codec.term_of_record(record)
        self._tell(partial(self._take_term, term, record, announced))

    def _take_term(self, term: Term, record: Mapping[str, Any], announced: int) -> None:
        self.agreement.take_term(term, announced)
        if self.agreement.term == term:
            self.record = record

    def _tell(self, news: Callable[[], object]) -> None:
        """Let the agreement know something that others say; what it may change is seen to."""

        def take_in() -> None:
            if self.evicted is None:
                before = self.agreement.term
                news()
                if self.agreement.term is not before:
                    now, announced = self.agreement.term, self.agreement.announced
                    self.record = record_of(now, announced, self.record)
                self._note_term(before, self.agreement.term)

        self.event(take_in)

    def _note_term(self, before: Term, now: Term) -> None:
        """See to the links and edges that a term needs, or needs no more."""
        known = lives_of(before)
        new = {node for node, joined in lives_of(now) if (node, joined) not in known}
        if new:
            self.members.welcome([each for each in now.newcomers if each.node in new], now)
        frozen = self.agreement.machine.frozen
        for action in self._node_changes.note(before, now, frozen=frozen):
            self._events.add_due(action)

    # Ranks that join and leave

    def join(self, session: str, admitted: Admitted) -> None:
        """Have a local rank join the group while it runs."""

        def join() -> None:
            self._ranks.joins(session, admitted)
            if self.evicted is None and not self.has_no_ranks:
                self.agreement.join(session)
            self._settle_joins()

        self.event(join)

    def wish_to_leave(self, session: str) -> None:
        """Have a local rank leave at the next edge, if the group has edges."""
        self.event(partial(self.agreement.wish_to_leave, session))

    def at_edge(self, session: str, seq: int, edge: int, go_on: GoOn) -> None:
        """Let a local rank wait at an edge, before an op.

        Args:
            edge: its number.
            go_on: called when the rank may call that op: the members have changed, or nobody waits.
        """

        def arrive() -> None:
            self._ranks.waits_at_edge(session, go_on)
            if self.evicted is None:
                self.agreement.at_edge(session, seq, edge)
            else:
                self._ranks.leave_edge(self.current)

        self.event(arrive)

    def _settle_joins(self) -> None:
        is_over = self.evicted is not None or self.has_no_ranks
        for session in self._ranks.settle_joins(self.current, is_over=is_over):
            self.epoch_table.session_joined(session, self.current.ordinal)

    @property
    def has_no_ranks(self) -> bool:
        """True once the nodes have agreed that no rank is in the group any more."""
        epoch = self.agreement.machine.epoch
        return self._is_over_elsewhere or (epoch is not NO_EPOCH and not epoch.seats)

    def _end_without_ranks(self) -> None:
        """End the group, because all ranks have left it: this node has missed that decision.

        Ranks that are to join ask for another one. With the lock held.
        """
        machine = self.agreement.machine
        living = machine.epoch.sessions_on(self.node) - machine.dead.keys()
        if living or self.evicted is not None or self.has_no_ranks:
            return  # where ranks of this node are in it, it is left out, and is to hear of that
        self._is_over_elsewhere = True
        self._settle_joins()
        for node in self.agreement.term.voters:  # others may wait for this one's reports
            if node != self.node:
                self.send(node, LinkMessageType.CLOSED, codec.pack_closed(all_left=True))
        self._events.add_due(partial(self._neighbours.group_over, self))

    def rank_ended(self, session: str, how: str, *, withdraws: bool = False) -> None:
        """Remove a local rank that is dead or has left; ``how`` is a phrase to follow its name.

        Args:
            withdraws: its process lives, and does not wait for its ops.
        """
        log.debug("rank of session %s of group '%s': %s", session, self.name, how)
        self._ranks.ended(session)
        self.epoch_table.session_ended(session)
        self.deferred.difference_update(
            [each for each in list(self.deferred) if each[0] == session]
        )
        self.event(partial(self._rank_ended, session, how, withdraws))

    def _rank_ended(self, session: str, how: str, withdraws: bool) -> None:
        self.close_lane()
        self.agreement.rank_ended(session, how, withdraws)
        self._settle_joins()

    # What the agreement wants done

    def carry_out(self, instruction: Instruction) -> None:
        """Do what the agreement says; see :mod:`allfold_core.survival.instructions`."""
        action = self._for_every_op.get(type(instruction))
        if action is not None:
            action(instruction)
        else:
            self._carry_out(instruction)

    def carried_out(self) -> None:
        self._runs.begin_waiting()

    def _release(self, instruction: Release) -> None:
        self._runs.release(instruction.floor)
        self._residuals.settle(instruction.floor)
        self.agreement.release(instruction.floor)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Cancel(seq, forward):
                self._runs.cancel(seq, forward=forward)
            case Drop(seq):
                self._runs.drop(seq, self.current.record)
            case Fetch():
                self._runs.fetch(instruction)
            case Refuse():
                self._runs.refuse(instruction)
            case RefuseCalls(seq, sessions):
                self._runs.refuse_calls(seq, sessions, self.current)
            case Installed(epoch, older):
                self._installed(epoch, older)
            case OpenLane(first):
                self.lanes.open_across(first)
            case LeaveEdge(sessions):
                self._ranks.leave_edge(self.current, sessions)
            case Evicted(term):
                how = dict(term.lost).get(self.node, "no rank of it was left")
                self._evict(evicted(self.name, self.node, how))

    def _installed(self, record: records.Epoch, older: tuple[records.Epoch, ...]) -> None:
        for each in older:
            # One with nodes that were lost before this node came: its ops are none of this node's.
            if each.nodes <= self.members.keys():
                self.epoch_table.take_in(each)
        before, self.current = self.current, self.epoch_table.take_in(record)
        if record.layout != before.record.layout:
            what = describe_layout(self.current.plan)
            log.warning("group '%s' epoch %d: %s", self.name, record.ordinal, what)
        if record.ordinal != before.ordinal:
            self.p2p.seats_added([*record.seats])
            if record.change:
                self._lost_ranks.note(before.record, record)
        self.lanes.entered(self.current)
        self.epoch_table.forget_old(self.table.in_flight.values(), self.agreement.machine.epochs)
        self.table.changed.notify_all()
        self._settle_joins()
        self._events.add_due(self.resume_frames)
        if not record.seats:
            self._events.add_due(partial(self._neighbours.group_over, self))

    def is_settled(self, seq: int) -> bool:
        """Return True if all local ranks have called an op, or it is over."""
        op = self.table.in_flight.get(seq)
        if op is not None:
            return op.ended or len(op.arrivals) == len(op.ranks)
        called = self.agreement.machine.called
        return all(called.get(each, -1) >= seq for each in self._sessions_here())

    def _sessions_here(self) -> frozenset[str]:
        return self.current.record.sessions_on(self.node)

    def deferred_calls(self) -> Mapping[str, int]:
        """By local session, the first op that waits for the GPU of its rank."""
        return dict(sorted(self.deferred, reverse=True))  # the lowest comes last

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        """Do something after a while, as an event."""
        self._resources.reactor.later(seconds, lambda: self.event(task))

    # The end

    def edge_failed(self, node: str, error: AllfoldError) -> None:
        """Withdraw the local ranks, because this node can receive nothing more from a live one."""
        for session in self._sessions_here():
            how = f"cannot receive from node {node}: {error.message}"
            self.rank_ended(session, how, withdraws=True)

    def evict(self, error: PeerLost) -> None:
        """Fail the ops in flight and all later calls: the group goes on without this node."""
        self.event(partial(self._evict, error))

    def _evict(self, error: PeerLost) -> None:
        if self.evicted is not None:
            return
        self.close_lane()
        self.evicted = error
        self.agreement.machine.evict()
        log.warning("%s", error.message)
        for op in list(self.table.in_flight.values()):
            self._runs.fail(op, error)
        self.table.changed.notify_all()
        self._settle_joins()
        self._ranks.leave_edge(self.current)
        self._events.add_due(self.edges.resume_all)
        self._events.add_due(partial(self.p2p.break_, error))
        if self.is_empty:
            self._events.add_due(partial(self._neighbours.group_over, self))

    def close(self, linger: float) -> None:
        """End the group on this node, after the peers have got what they are still owed.

        Args:
            linger: seconds that they have for it.
        """
        self.lanes.end()
        self._edges.close(linger)
        with self.table.lock:
            self.results.close()
