"""A group on an agent of the simulation: the real agreement, with ops that are only messages.

An op's attempt is done on a node when a frame of every node of its epoch has come, whatever the
strategy; a result that went forward is fetched from a holder; partitioned kinds close. What a rank
is told is written into the ledger of the world.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from allfold_agent.edges.members import GroupNodes
from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.epoch import EpochTable, GroupEpoch, NodeResources
from allfold_agent.groups.events import Decisions, EventQueue
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.local_ranks import LocalRanks
from allfold_agent.groups.neighbours import NodeChanges
from allfold_agent.groups.outcomes import OpTable
from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.errors import PeerLost
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.survival import records
from allfold_core.survival.instructions import (
    Fetch,
    HandOut,
    Refuse,
    Start,
)
from allfold_core.survival.plans import GroupPolicy, first_epoch, first_record
from allfold_core.survival.records import NO_EPOCH, Stamp
from allfold_core.survival.reports import Call, Doubt, OpState, Reason
from allfold_core.survival.term_record import TermRecord

if TYPE_CHECKING:
    from tests.simulator.agent import Agent
    from tests.simulator.ranks import Rank

DEADLINE_TICK = 0.5
FETCH_SECONDS = 0.3
LONGEST_TRANSFER = 0.06


class _Nothing:
    """A part of a group that no story needs: every call of it does nothing."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda *_args, **_named: None


class _SimulatedEpoch:
    """The members of a group during one epoch."""

    def __init__(self, record: records.Epoch, node: str) -> None:
        self.record = record
        self.stamp = record.stamp
        self.ordinal = record.ordinal
        self.plan = SimpleNamespace(layout=record.layout)
        self._here = record.sessions_on(node)

    def has(self, session: str) -> bool:
        return session in self._here


class SimulatedGroup(NodeGroup):
    """One node's part in a group.

    Attributes:
        ranks: the local ones that are in it, by session.
        birth: tells it from another group with the same numbers, of which nobody was left when the
            store had lost everything.
        seats: those that the node has known, by its number and theirs.
    """

    def __init__(self, agent: Agent, plan: Plan, joins: TermRecord | None = None) -> None:
        # As the real one does, but for what moves data.
        self.name, self.opening, self.plan, self.node = plan.group, plan.opening, plan, agent.node
        self._agent = agent
        self._world = agent.world
        self.birth = agent.world.ledger.birth_of(plan)
        self._rng = random.Random(f"{agent.world.seed} {agent.incarnation}")
        self.table = OpTable()
        self.deferred = set()
        self.evicted = None
        self._is_over_elsewhere = False
        self.record = first_record(plan) if joins is None else joins
        self.neighbours = cast(Any, agent)
        term = self.record.term
        self.lost_before = frozenset(term.lost)
        first = NO_EPOCH if joins else first_epoch(plan)
        self.members = GroupNodes(plan.members, term)
        nothing = cast(Any, _Nothing())
        self.deadlines = cast(Any, SimpleNamespace(waits_for=lambda: "the decision of its nodes"))
        self.residuals = self.outcomes = self.lanes = self.stand_ins = nothing
        self.edges, self.p2p = cast(Any, _Edges(agent)), cast(Any, _Nothing())
        self.p2p.edges = self.edges
        self.events = EventQueue(self.name, self.table)
        self.event = self.events.run
        self.runs: Any = _Runs(self)
        self.calls = cast(Any, SimpleNamespace(stand_in=self._stand_in))
        self._late: dict[tuple[str, int], tuple[str, Any, int] | None] = {}
        self.results = cast(Any, self.runs)
        self.local_ranks = LocalRanks(first.sessions_on(self.node), self.events.add_due)
        self._node_changes = NodeChanges(
            partial(agent.joined, self), partial(agent.left_out, self), self.members.dismiss
        )
        self.epoch_table = EpochTable(self._make_epoch, first, self.local_ranks.sessions)
        self.current = self.epoch_table.first
        self.hindrances = Hindrances()
        self.decisions = _Decisions(self, cast(Any, agent))
        policy = GroupPolicy(plan.group, plan.options)
        self.agreement = Agreement(
            self.node, policy, term, first, self.events, self.decisions, self.send, self.hindrances
        )
        self.ranks: dict[str, Rank] = {}
        self.seats: dict[tuple[int, int], records.Seat] = {}
        self._called_at: dict[int, float] = {}
        self._is_closed = False
        self._watch()

    def _make_epoch(self, record: records.Epoch) -> GroupEpoch:
        self._world.ledger.known(self, record)
        return cast(GroupEpoch, _SimulatedEpoch(record, self.node))

    # Calls

    def rank_calls(self, rank: Rank, seq: int, kind: Kind, view: int) -> None:
        """A local rank calls an op."""
        self.event(partial(self._arrive, rank, seq, kind, view))

    def _arrive(self, rank: Rank, seq: int, kind: Kind, view: int) -> None:
        session, machine = rank.session, self.agreement.machine
        if self.evicted is not None:
            self.tell(rank, seq, ("error", "evicted", view))
            return
        if session in machine.dead:
            return
        if (session, seq) in self._late:
            self._come_late(rank, seq, view)
            return
        failed = machine.failure(seq)
        if failed is not None:
            self.tell(rank, seq, ("error", failed.error, failed.ordinal))
        else:
            self.runs.calls[seq].add(session)
            self._called_at.setdefault(seq, self._world.loop.time())
        self.epoch_table.note_view(session, view)
        self.agreement.call(seq, session, self._call_of(seq, kind, view))

    def _stand_in(self, seq: int, session: str, _: Call) -> None:
        """An op does not wait for a rank, which gets its outcome when it calls it."""
        self._late[session, seq] = None
        self.runs.calls[seq].add(session)

    def _come_late(self, rank: Rank, seq: int, view: int) -> None:
        """A rank calls an op that has not waited for it."""
        outcome = self._late.pop((rank.session, seq))
        self.epoch_table.note_view(rank.session, view)
        self.agreement.machine.note_called({rank.session: seq})
        if outcome is not None:  # else it is told with the others
            self.tell(rank, seq, outcome)

    def settled(self, rank: Rank, seq: int, outcome: tuple[str, Any, int]) -> None:
        """An op is over that a rank, or this node in its place, has called."""
        if (rank.session, seq) in self._late:
            self._late[rank.session, seq] = outcome
        else:
            self.tell(rank, seq, outcome)

    def _call_of(self, seq: int, kind: Kind, view: int) -> Call:
        known = self.epoch_table.by_ordinal.get(view)
        root = known.record.seats[0].session if known and known.record.seats else ""
        return self._world.call_of(kind, view, root)

    def tell(self, rank: Rank, seq: int, outcome: tuple[str, Any, int]) -> None:
        """Tell a rank what has become of its call."""
        self._world.ledger.told(self._agent, rank, seq, outcome)
        self._world.network.post(self._agent.process, rank.process, rank.outcome, seq, outcome)

    # Deadlines

    def _watch(self) -> None:
        """Have ops judged whose deadline is over, as the real group does."""
        if self.evicted is not None or self._is_closed:
            return
        self._agent.process.later(DEADLINE_TICK, self._watch)
        machine, now = self.agreement.machine, self._world.loop.time()
        if machine.frozen or self._agent.group_links.missing(self):
            for seq in self._called_at:
                self._called_at[seq] += DEADLINE_TICK
            return
        waiting = {
            seq for seq, sessions in self.runs.calls.items() if sessions - machine.dead.keys()
        }
        self._called_at = {seq: at for seq, at in self._called_at.items() if seq in waiting}
        late = [seq for seq, at in self._called_at.items() if now - at >= self.plan.options.timeout]
        doubts = [Doubt(seq, Reason.DEADLINE, self.plan.options.timeout) for seq in late]
        for seq in late:
            self._world.ledger.overdue(self, seq, self.runs.calls[seq])
            self._called_at[seq] = now - self.plan.options.timeout + 1.0
        if doubts:
            self.event(partial(self.agreement.doubt, doubts))

    def close(self, linger: float) -> None:
        self._is_closed = True

    # Messages of other nodes

    def learn_floor(self, floor: int) -> None:
        if self.evicted is None and floor > self.agreement.machine.floor:
            self.event(partial(self.agreement.learn_floor, floor))

    def take_frame(self, node: str, seq: int, stamp: Stamp) -> None:
        """A node's part of an attempt has come on its edge."""
        if self.evicted is None:
            self.event(partial(self.runs.take_frame, node, seq, stamp))

    def result_came(self, each: Fetch) -> None:
        """A holder has sent the result of an op."""
        if self.evicted is None:
            self.event(partial(self.runs.fetched, each))

    def holds(self, seq: int, stamp: Stamp) -> bool:
        """Return True if this node can give others the result of an op."""
        entry = self.agreement.machine.ops.get(seq)
        states = (OpState.HELD, OpState.HANDED)
        return entry is not None and entry.state in states and entry.stamp == stamp


class _Decisions(Decisions):
    """Does what the agreement says, and writes it into the ledger."""

    def __init__(self, group: SimulatedGroup, resources: NodeResources) -> None:
        super().__init__(group, resources)
        self._simulated = group

    def _installed(self, record: records.Epoch, older: tuple[records.Epoch, ...]) -> None:
        self._simulated._world.ledger.installed(self._simulated, record)
        super()._installed(record, older)

    def evict(self, error: PeerLost) -> None:
        super().evict(error)
        self._simulated.runs.fail_all()


class _Edges:
    """The edges of a group, as far as an agent asks for them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def last_heard(self, node: str) -> float:
        return self._agent.heard_on_edges.get(node, float("-inf"))

    def resume_all(self) -> None:
        return


class _Runs:
    """The attempts of a group's ops: contributions, fetched results, and who is to be told.

    Attributes:
        calls: the sessions that wait for each op.
    """

    def __init__(self, group: SimulatedGroup) -> None:
        self._group = group
        self._agent = group._agent
        self._world = group._world
        self.calls: defaultdict[int, set[str]] = defaultdict(set)
        self._frames: defaultdict[tuple[int, Stamp], set[str]] = defaultdict(set)
        self._running: dict[int, records.Epoch] = {}
        self._fetching: dict[int, Fetch] = {}

    # What the agreement says

    def start(self, each: Start) -> None:
        seq, epoch, group = each.seq, each.epoch, self._group
        self._world.ledger.started(group, each)
        self._running[seq] = epoch
        took = LONGEST_TRANSFER * self._group._rng.random()
        self._agent.process.later(took, self._contribute, seq, epoch)

    def _contribute(self, seq: int, epoch: records.Epoch) -> None:
        if self._running.get(seq) is not epoch:
            return  # it was cancelled
        for node in sorted(epoch.nodes):
            self._agent.send_frame(self._group, node, seq, epoch.stamp)

    def take_frame(self, node: str, seq: int, stamp: Stamp) -> None:
        """A node's contribution has come."""
        if seq <= self._group.agreement.machine.floor:
            return
        self._frames[seq, stamp].add(node)
        self._look(seq)

    def _look(self, seq: int) -> None:
        epoch = self._running.get(seq)
        if epoch is not None and epoch.nodes <= self._frames[seq, epoch.stamp]:
            self._group.agreement.completed(seq, epoch.stamp, -1)

    def cancel(self, seq: int, *, forward: bool) -> None:
        self._running.pop(seq, None)
        self._fetching.pop(seq, None)

    def drop(self, seq: int, _: object) -> None:
        self.cancel(seq, forward=False)
        waiting = sorted(self.calls.pop(seq, ()))
        self._world.ledger.dropped(self._group, seq, waiting)

    def fetch(self, each: Fetch) -> None:
        self._fetching[each.seq] = each
        self._ask_holder(each, 0)

    def _ask_holder(self, each: Fetch, tries: int) -> None:
        """Ask one holder after the other, until one has answered or the fetch is given up."""
        if self._fetching.get(each.seq) is not each or self._group.evicted is not None:
            return
        holders: Sequence[str] = each.holders
        self._agent.ask_result(self._group, holders[tries % len(holders)], each)
        self._agent.process.later(FETCH_SECONDS, self._ask_holder, each, tries + 1)

    def fetched(self, each: Fetch) -> None:
        """A holder has sent the result."""
        if self._fetching.get(each.seq) is each:
            del self._fetching[each.seq]
            self._group.agreement.fetched(each.seq, each.stamp)

    def hand_out(self, each: HandOut) -> None:
        epoch = self._world.ledger.epochs[self._group.birth, each.stamp]
        self._running.pop(each.seq, None)
        self._tell_all(each.seq, ("result", each.stamp, epoch.ordinal))

    def refuse(self, each: Refuse) -> None:
        self._tell_all(each.seq, ("error", each.error, each.ordinal))

    def refuse_calls(self, seq: int, sessions: frozenset[str], _: object) -> None:
        self.calls[seq] -= sessions

    def fail(self, *_: object) -> None:
        return

    def release(self, floor: int) -> None:
        for key in [key for key in self._frames if key[0] <= floor]:
            del self._frames[key]

    # What pings carry

    def progress(self, _: str) -> tuple[int, int, int]:
        return self._group.agreement.machine.watermark, -1, 0

    def learn_progress(self, node: str, watermark: int, _: int, __: int) -> None:
        group = self._group
        if group.evicted is None and not group._is_closed:
            group.event(partial(group.agreement.learn_watermark, node, watermark))

    def _tell_all(self, seq: int, outcome: tuple[str, Any, int]) -> None:
        group = self._group
        group._called_at.pop(seq, None)
        for session in sorted(self.calls.pop(seq, ())):
            if session in group.ranks:
                group.settled(group.ranks[session], seq, outcome)

    def fail_all(self) -> None:
        """Tell all ranks that the group goes on without this node."""
        for seq in sorted(self.calls):
            self._tell_all(seq, ("error", "evicted", -1))
