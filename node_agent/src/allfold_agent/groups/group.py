"""A group on this node, as long as it lasts, over all epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any

from allfold_agent.arithmetic.error_feedback import Residuals
from allfold_agent.edges.members import GroupNodes, lives_of
from allfold_agent.execution.stand_ins import StandIns
from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.deadlines import Deadlines
from allfold_agent.groups.epoch import EpochTable, GroupEpoch, NodeResources
from allfold_agent.groups.events import Decisions, EventQueue
from allfold_agent.groups.group_edges import GroupEdges
from allfold_agent.groups.lane.keeper import LaneKeeper
from allfold_agent.groups.local_ranks import Admitted, CallIntake, GoOn, LocalRanks
from allfold_agent.groups.neighbours import Neighbours, NodeChanges, SlowLinkWatch
from allfold_agent.groups.op_runs import OpRuns
from allfold_agent.groups.outcomes import OpTable, Outcomes
from allfold_agent.groups.registry import record_of, with_seats
from allfold_agent.groups.results import Results
from allfold_control.survival import Closed, Rates, pack, unpack
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.incident import Incident
from allfold_core.plan import Plan
from allfold_core.protocol.frames import FrameError
from allfold_core.protocol.peer_link import GroupMessage, LinkMessageType
from allfold_core.survival import records
from allfold_core.survival.judge import unpacked
from allfold_core.survival.plans import GroupPolicy, first_epoch, first_record
from allfold_core.survival.records import NO_EPOCH, Term
from allfold_core.survival.term_record import TermRecord

log = logging.getLogger(__name__)


class NodeGroup:
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
        evicted: the error of every call, once the group has gone on without this node.
        current: the newest epoch.
        event: lets the group know something, and does what follows from it.
        on_observed: takes what the observer of another node says; must not wait.
        deferred: (session, seq) of calls that wait for the GPU of their rank, and have not arrived.
    """

    def __init__(
        self,
        plan: Plan,
        resources: NodeResources,
        neighbours: Neighbours,
        joins: TermRecord | None = None,
    ) -> None:
        self.name = plan.group
        self.opening = plan.opening
        self.plan = plan
        self.node = resources.node
        self.table = OpTable()
        self.outcomes = Outcomes(self.name, self.node, self.table, resources.errors)
        self.results = Results(self.table, resources.retention)
        self.deferred: set[tuple[str, int]] = set()
        self.evicted: PeerLost | None = None
        self._is_over_elsewhere = False
        self.record = first_record(plan) if joins is None else joins
        self._resources = resources
        self.neighbours = neighbours
        term = _checked(self.record)
        self.lost_before = frozenset(term.lost)
        first = NO_EPOCH if joins else first_epoch(plan)
        self.members = GroupNodes(plan.members, term)
        self.residuals = Residuals()
        self.stand_ins = StandIns(lambda: resources.retention.share)
        self._edges = GroupEdges(self, resources)
        self.edges, self.p2p, self.serve_edge = self._edges.ops, self._edges.p2p, self._edges.serve
        self.events = EventQueue(self.name, self.table)
        self.event = self.events.run
        self.calls = CallIntake(self)
        self.deadlines = Deadlines(self, neighbours)
        self.runs = OpRuns(self, resources)
        self.events.at_end = self.runs.begin_waiting
        self.local_ranks = LocalRanks(first.sessions_on(self.node), self.events.add_due)
        self._node_changes = NodeChanges(
            partial(neighbours.joined, self), partial(neighbours.left_out, self), self._edges.drop
        )
        self.epoch_table = EpochTable(self._make_epoch, first, self.local_ranks.sessions)
        self.current = self.epoch_table.first
        self.hindrances = Hindrances()
        self.on_observed: Callable[[str, dict[str, Any]], None] = lambda *_: None
        self.decisions = Decisions(self, resources)
        policy = GroupPolicy(plan.group, plan.options)
        self.agreement = Agreement(
            self.node, policy, term, first, self.events, self.decisions, self.send, self.hindrances
        )
        self.link_watch = SlowLinkWatch(self, resources)
        self.lanes = LaneKeeper(self, resources)
        self.outcomes.on_idle = self.lanes.consider_opening
        self.lanes.entered(self.current)

    def begin(self) -> None:
        """Take part in the group, where this node has joined it while it runs."""
        self.event(self.agreement.begin)

    # Epochs

    def _make_epoch(self, record: records.Epoch) -> GroupEpoch:
        return GroupEpoch(
            self.plan,
            record,
            self._resources,
            members=self.members,
            edges=self.edges,
            ops=self.runs,
            residuals=self.residuals,
        )

    @property
    def epochs(self) -> Mapping[int, GroupEpoch]:
        """The epochs by ordinal, the newest last; a mapping that is never changed."""
        return self.epoch_table.by_ordinal

    def epoch_of(self, seq: int) -> GroupEpoch:
        """The epoch in which an op without calls is to be run."""
        entry = self.agreement.machine.ops.get(seq)
        stamp = entry.stamp if entry is not None else None
        return self.current if stamp is None else self.epoch_table.of(stamp)

    @property
    def is_empty(self) -> bool:
        """True once every rank of this node has left or is dead."""
        return self.local_ranks.have_ended

    # Events

    def send(self, node: str, kind: LinkMessageType, body: dict[str, Any]) -> None:
        """Send another node a message, which is lost if the link to it is down."""
        self.neighbours.send(node, GroupMessage(kind, self.name, self.opening, body))

    def receive(self, node: str, message: GroupMessage) -> None:
        """Take in a message of another node; ``FrameError`` where it is none."""
        match message.type:
            case LinkMessageType.CLOSED:
                self._closed_elsewhere(node, all_left=unpack(Closed, message.body).all_left)
            case LinkMessageType.RATES:
                self.link_watch.take_rates(node, unpack(Rates, message.body).rates)
            case LinkMessageType.OBSERVED:
                self.on_observed(node, message.body)
            case kind:
                self._tell(partial(self.agreement.receive, node, kind, message.body))

    def _closed_elsewhere(self, node: str, *, all_left: bool) -> None:
        """The group is over on another node.

        A node that was left out says nothing about the others: they may go on with this one, even
        if it has no rank at the moment. The orchestrator tells this node if it is left out, too.
        """
        log.info("group '%s' is over on node %s", self.name, node)
        if all_left:
            self.event(self._end_without_ranks)

    def tell_others_of(self, incident: Incident) -> None:
        """Share an incident with all nodes, so that the errors of this group quote it."""
        self.hindrances.take_in(incident, monotonic())
        for node in self.agreement.term.voters:
            if node != self.node:
                self.send(node, LinkMessageType.OBSERVED, {"incident": incident.to_dict()})

    def learn_floor(self, floor: int) -> None:
        """Every op up to this one is final on all nodes."""
        if self.evicted is None:
            self.event(partial(self.agreement.learn_floor, floor))

    def link_up(self, node: str) -> None:
        """Send a node what it may have missed, as its link is up."""
        self._tell(partial(self.agreement.link_up, node))

    def registers(self) -> TermRecord:
        """Return the record of the newest term: no other is taken until :meth:`registered`."""
        with self.table.lock:
            self.agreement.registers()
            epoch = self.agreement.machine.epoch
            return with_seats(self.record, epoch, self.node, self.local_ranks.present)

    def registered(self, generation: int) -> None:
        """Note the store's generation: terms that older ones announced are refused from now on."""
        self._tell(partial(self.agreement.registered, generation))

    def take_term(self, record: TermRecord, announced: int) -> None:
        """Take in the announced record of a term; ``FrameError`` if it is not valid.

        Args:
            announced: the generation of the store that has announced it.
        """
        term = _checked(record)
        self._tell(partial(self._take_term, term, record, announced))

    def _take_term(self, term: Term, record: TermRecord, announced: int) -> None:
        self.agreement.take_term(term, announced)
        if self.agreement.term == term:
            self.record = record

    def _tell(self, news: Callable[[], object]) -> None:
        """Pass news of others to the agreement, and see to what they may change."""

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
        for action in self._node_changes.actions_between(before, now, frozen=frozen):
            self.events.add_due(action)

    # Ranks that join and leave

    def join(self, session: str, admitted: Admitted) -> None:
        """Ask for a local rank to be let into the group while it runs."""

        def join() -> None:
            # First: where this node decides, the agreement may let it in within the call below.
            self.local_ranks.joins(session, admitted)
            if self.evicted is None and not self.has_no_ranks:
                self.agreement.join(session)
            self.settle_joins()

        self.event(join)

    def wish_to_leave(self, session: str) -> None:
        """Ask for a local rank to be let go at the next boundary, if the group has boundaries."""
        self.event(partial(self.agreement.wish_to_leave, session))

    def at_boundary(self, session: str, seq: int, boundary: int, go_on: GoOn) -> None:
        """Keep a local rank waiting at a boundary, before an op.

        Args:
            boundary: its number.
            go_on: called when the rank may call that op: the members have changed, or nobody waits.
        """

        def arrive() -> None:
            # First: the agreement may release it within the call below.
            self.local_ranks.waits_at_boundary(session, go_on)
            if self.evicted is None:
                self.agreement.at_boundary(session, seq, boundary)
            else:
                self.local_ranks.leave_boundary(self.current)

        self.event(arrive)

    def settle_joins(self) -> None:
        is_over = self.evicted is not None or self.has_no_ranks
        for session in self.local_ranks.settle_joins(self.current, is_over=is_over):
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
        # First: settle_joins asks for it.
        self._is_over_elsewhere = True
        self.settle_joins()
        for node in self.agreement.term.voters:  # others may wait for this one's reports
            if node != self.node:
                self.send(node, LinkMessageType.CLOSED, pack(Closed(all_left=True)))
        self.events.add_due(partial(self.neighbours.group_over, self))

    def rank_ended(self, session: str, how: str, *, withdraws: bool = False) -> None:
        """Remove a local rank that is dead or has left; ``how`` is a phrase to follow its name.

        Args:
            withdraws: its process lives, and does not wait for its ops.
        """
        log.debug("rank of session %s of group '%s': %s", session, self.name, how)
        # First: in the event, joins are settled by which ranks have ended.
        self.local_ranks.ended(session)
        self.epoch_table.session_ended(session)
        self.deferred.difference_update(
            [each for each in list(self.deferred) if each[0] == session]
        )
        self.event(partial(self._rank_ended, session, how, withdraws))

    def _rank_ended(self, session: str, how: str, withdraws: bool) -> None:
        self.stand_ins.forget(session)
        # First: what the ranks have done by themselves counts before one of them is gone.
        self.lanes.close()
        self.agreement.rank_ended(session, how, withdraws)
        self.settle_joins()

    # What is known of its ops and ranks

    def failure(self, seq: int) -> AllfoldError | None:
        """Return why an op has failed; ``None`` if it may still succeed.

        Without waiting for the lock; may miss what changes meanwhile.
        """
        failed = self.failed_call(seq, 0)
        return None if failed is None else failed[0]

    def failed_call(self, seq: int, view: int) -> tuple[AllfoldError, int] | None:
        """Return the error of a call whose op has failed, and the epoch that the rank is in then.

        ``None`` if the op may still succeed. As :meth:`failure`, it does not wait.

        Args:
            view: the epoch that the rank knew when it called.
        """
        if self.evicted is not None:
            return self.evicted, view
        failed = self.agreement.machine.failure(seq)
        return None if failed is None else (unpacked(failed.error), failed.ordinal)

    @property
    def waiting(self) -> bool:
        """True while a local rank waits for anything, so that deadlines must be watched."""
        return bool(self.table.in_flight or self.deferred) or self.p2p.waiting

    def await_departure(self, session: str, seconds: float) -> None:
        """Return once the nodes have agreed that a rank is gone, or after so many seconds."""
        with self.table.lock:
            self.table.changed.wait_for(
                lambda: self.evicted is not None or session not in self.current.record.sessions,
                timeout=seconds,
            )

    # The end

    def edge_failed(self, node: str, error: AllfoldError) -> None:
        """Withdraw the local ranks, because this node can receive nothing more from a live one."""
        for session in self.current.record.sessions_on(self.node):
            how = f"cannot receive from node {node}: {error.message}"
            self.rank_ended(session, how, withdraws=True)

    def evict(self, error: PeerLost) -> None:
        """Fail the ops in flight and all later calls: the group goes on without this node."""
        self.event(partial(self.decisions.evict, error))

    def close(self, linger: float) -> None:
        """End the group on this node, after the peers have got what they are still owed.

        Args:
            linger: seconds that they have for it.
        """
        self.lanes.end()
        self._edges.close(linger)
        with self.table.lock:
            self.results.close()


def _checked(record: TermRecord) -> Term:
    """Return the term of a record; ``FrameError`` where frames have no room for its number."""
    try:
        return record.term.check()
    except ValueError as error:
        raise FrameError(f"a record of a term cannot be used: {error}") from error
