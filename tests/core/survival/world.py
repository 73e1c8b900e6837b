"""A world of nodes that run the real machines, for a search through everything that can happen.

Every message may take any time, messages overtake each other, and what a dead node has sent may
arrive or be lost. A frame is "a node has contributed to an op in an epoch": that its content needs
all contributions, however the schedule routes them, is what all strategies have in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from allfold_core.errors import AllfoldError, PeerMissing
from allfold_core.survival import instructions as agent
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Install,
    OpState,
    Reason,
    Report,
    is_replicated,
    may_shrink,
)
from tests.core.survival.calls import call_of
from tests.core.survival.scenario import FAITHFUL, KINDS, Mutant, Scenario, name, number
from tests.support.state_search import Violation

HOLDS = (OpState.HELD, OpState.HANDED)


def judge_any(
    seq: int, _epoch: Epoch, _reports: object, doubt: Doubt | None
) -> AllfoldError | None:
    """A verdict on whatever missed its deadline."""
    late = doubt is not None and doubt.reason is Reason.DEADLINE
    return PeerMissing(f"op {seq} was late") if late else None


def _first(scenario: Scenario) -> tuple[Term, Epoch]:
    """The term and the epoch with which a group is opened."""
    seats = tuple(Seat(f"r{rank}", name(at)) for rank, at in enumerate(scenario.rank_node))
    term = Term(0, 0, tuple(map(name, range(scenario.nodes))), (0,) * scenario.nodes)
    return term, Epoch(Stamp(0, 0, 0), 0, seats)


class World:
    """All nodes, the orchestrator's record, and what is under way between them.

    Attributes:
        terms: all that were ever decided; a term is named by its place in this list.
        parents: of each term, those that it was made from.
        announced: of each term, the generations of the store that have announced it.
        record: the orchestrator's term; ``None`` while it is lost.
        reported: the nodes that have registered with the present store.
        leaders: by term, on nodes that live.
        ordinals: of the epochs that were decided.
        layouts: the order of nodes in each of them.
        called: (rank, op): the calls that were made.
        told: by node and op, the outcome that its ranks have got.
        started: by op and epoch, the nodes that have contributed.
        closings: by op and epoch, the nodes that have sent closing signals.
        sent: DOWN and DOUBT by term, on their way to its leader.
        arrived: those that were delivered, and may be once more.
    """

    def __init__(
        self,
        scenario: Scenario,
        mutant: Mutant = FAITHFUL,
        first: tuple[Term, Epoch] | None = None,
    ) -> None:
        self.s, self.mutant = scenario, mutant
        everyone = tuple(range(scenario.nodes))
        term, epoch = first or _first(scenario)
        self.policy = mutant.policy("g", not scenario.raises, scenario.min_world)
        self.terms: list[Term] = [term]
        self.parents: list[tuple[int, ...]] = [()]
        self.announced: list[set[int]] = [{0}]
        self.record: int | None = 0
        self.recalled = False
        self.reported: set[int] = set(everyone)
        self.generation = 0
        self.orch = scenario.orchestrator
        self.alive = [True] * scenario.nodes
        self.agents = [mutant.agent(name(n), self.policy, term, epoch) for n in everyone]
        self.leaders: dict[int, LeaderMachine] = {}
        self.lead(term, gathering=False)
        self.dead: set[int] = set()
        self.called: set[tuple[int, int]] = set()
        self.told: dict[tuple[int, int], tuple[str, Any, int]] = {}
        self.started: dict[tuple[int, Stamp], set[int]] = {}
        self.closings: dict[tuple[int, Stamp], set[int]] = {}
        self.reports: dict[tuple[int, int, int], Report] = {}
        self.installs: dict[tuple[int, int], Install] = {}
        self.ordinals = {epoch.stamp: 0}
        self.layouts = {epoch.stamp: epoch.layout}
        self.sent: set[tuple[int, str | Doubt]] = set()
        self.arrived: set[tuple[int, str | Doubt]] = set()
        self.completed_in: set[int] = set()
        s = scenario
        self.budget = {
            "crash": s.crashes,
            "rank": s.rank_deaths,
            "false": s.false,
            "loss": s.losses,
            "verdict": s.verdicts,
            "orch": s.orch_crashes,
            "again": s.again,
            "arrange": s.arrangements,
        }
        for seq in range(len(s.kinds)):
            for rank in range(len(scenario.rank_node)):
                if (rank, seq) not in s.late:
                    self.call(rank, seq)
        self.settle()

    def copy(self) -> Self:
        """Return an independent world in the same state."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.terms, other.parents = list(self.terms), list(self.parents)
        other.announced = [set(each) for each in self.announced]
        other.reported, other.alive = set(self.reported), list(self.alive)
        other.agents = [each.copy() for each in self.agents]
        other.leaders = {t: each.copy() for t, each in self.leaders.items()}
        other.dead, other.called = set(self.dead), set(self.called)
        other.told = dict(self.told)
        other.started = {key: set(nodes) for key, nodes in self.started.items()}
        other.closings = {key: set(nodes) for key, nodes in self.closings.items()}
        other.reports, other.installs = dict(self.reports), dict(self.installs)
        other.ordinals, other.layouts = dict(self.ordinals), dict(self.layouts)
        other.sent, other.arrived = set(self.sent), set(self.arrived)
        other.completed_in = set(self.completed_in)
        other.budget = dict(self.budget)
        return other

    def key(self) -> object:
        """Equal for states with equal futures."""
        again = frozenset(self.arrived) if self.budget["again"] else None
        return (
            tuple(map(self._agent_key, range(self.s.nodes))),
            tuple((t, *self._leader_key(t)) for t in sorted(self.leaders)),
            tuple(self.terms),
            tuple(map(frozenset, self.announced)),
            (self.record, self.recalled, frozenset(self.reported), self.generation, self.orch),
            frozenset(self.dead),
            frozenset(self.called),
            frozenset(self.told.items()),
            frozenset((key, frozenset(nodes)) for key, nodes in self.started.items()),
            frozenset((key, frozenset(nodes)) for key, nodes in self.closings.items()),
            frozenset((key, _content(report)) for key, report in self.reports.items()),
            frozenset((key, _decision(install)) for key, install in self.installs.items()),
            (frozenset(self.sent), again),
            tuple(self.budget.values()),
        )

    def _leader_key(self, t: int) -> tuple[object, ...]:
        leader = self.leaders[t]
        news = (tuple(leader._dead), tuple(leader._doubts), tuple(leader._later))
        layouts = (leader._layout, leader._later_layout)
        return (leader.round, leader.gathering, news, layouts)

    def _agent_key(self, n: int) -> object:
        a = self.agents[n]
        if not self.alive[n]:
            return tuple((k, e.state, e.stamp) for k, e in a.ops.items() if e.state in HOLDS)
        ops = tuple(
            (
                (k, e.state, e.stamp, e.started, e.complete, e.closed, e.forward),
                (e.fetch, e.fetching, e.doubted),
                tuple((session, call.view) for session, call in e.calls.items()),
            )
            for k, e in sorted(a.ops.items())
        )
        marks = tuple(a._watermarks.values()) if self.s.slow else None
        return (
            (a.term.number, a.term.generation, a.generation),
            (a.round, a.frozen, a.out, a.epoch.stamp, a.floor, a.watermark, marks),
            ops,
        )

    # Small questions

    def live(self) -> list[int]:
        """The nodes that run and are not out."""
        return [n for n in range(self.s.nodes) if self.alive[n] and not self.agents[n].out]

    def term_of(self, n: int) -> int:
        return self.terms.index(self.agents[n].term)

    def voters(self, t: int) -> set[int]:
        return set(map(number, self.terms[t].voters))

    def ancestors(self, t: int) -> set[int]:
        seen: set[int] = set()
        todo = [t]
        while todo:
            for parent in self.parents[todo.pop()]:
                if parent not in seen:
                    seen.add(parent)
                    todo.append(parent)
        return seen

    def excluded(self, n: int) -> bool:
        """Return True if some term that was ever decided leaves the node out."""
        return any(n not in self.voters(t) for t in range(len(self.terms)))

    def view(self, rank: int) -> int:
        """The newest epoch that a rank knows: from the outcomes of what it has called."""
        n = self.s.rank_node[rank]
        known = (
            outcome[2]
            for (at, seq), outcome in self.told.items()
            if at == n and (rank, seq) in self.called
        )
        return max(known, default=0)

    def completes(self, n: int, t: int) -> None:
        """Note that a node has computed an op in an epoch of a term."""
        self.completed_in.add(t)

    # What agents are told to do

    def lead(self, term: Term, *, gathering: bool) -> None:
        """The first voter of a term runs its rounds."""
        epoch = self.agents[number(term.leader)].epoch
        machine = self.mutant.leader(self.policy, term, epoch, judge_any, gathering=gathering)
        self.leaders[self.terms.index(term)] = machine

    def carry_out(self, n: int, instructions: Iterable[agent.Instruction]) -> None:
        me = self.agents[n]
        for each in instructions:
            if isinstance(each, agent.Start):
                self._check_start(n, each)
                self.started.setdefault((each.seq, each.epoch.stamp), set()).add(n)
            elif isinstance(each, agent.SendClosing):
                entry = me.ops.get(each.seq)
                if entry is None or entry.stamp is None:
                    raise Violation(f"node {n} has forgotten op {each.seq}, which it closes")
                self.closings.setdefault((each.seq, entry.stamp), set()).add(n)
            elif isinstance(each, agent.Fetch):
                if not is_replicated(KINDS[self.s.kinds[each.seq]]):
                    raise Violation(f"node {n} is to get its part of op {each.seq} elsewhere")
            elif isinstance(each, agent.HandOut):
                self._tell(n, each.seq, ("result", each.stamp, self.ordinals[each.stamp]))
            elif isinstance(each, agent.Refuse):
                self._tell(n, each.seq, ("error", each.error, each.ordinal))
            elif isinstance(each, agent.SendReport):
                report = each.report
                self.reports[self.terms.index(report.term), report.round, n] = report
            elif isinstance(each, agent.SendDoubt):
                self.sent.add((self.term_of(n), each.doubt))
            elif isinstance(each, agent.SendDown):
                self.sent |= {(self.term_of(n), session) for session, _ in each.dead}

    def _check_start(self, n: int, start: agent.Start) -> None:
        if len(start.epoch.seats) < self.s.min_world:
            raise Violation(f"op {start.seq} is run by fewer ranks than min_world")
        if (n, start.seq) in self.told:
            raise Violation(f"I5: op {start.seq} is run again on node {n}, which has its outcome")
        begun = [
            stamp for (seq, stamp), nodes in self.started.items() if seq == start.seq and n in nodes
        ]
        if begun and self.s.is_harmless:
            raise Violation(f"op {start.seq} is run again on node {n}, although nobody is lost")
        for session in start.epoch.sessions_on(name(n)):
            call = self.agents[n].ops[start.seq].calls[session]
            if call.view != start.epoch.ordinal and (self.s.raises or not may_shrink(call.kind)):
                raise Violation(f"op {start.seq} is run with a call of view {call.view}")

    def decided(self, epoch: Epoch) -> None:
        """A round has named an epoch, which may have been there before."""
        self.ordinals[epoch.stamp] = epoch.ordinal
        if self.layouts.setdefault(epoch.stamp, epoch.layout) != epoch.layout:
            raise Violation(f"the nodes of epoch {epoch.stamp} do not know their order")

    def _tell(self, n: int, seq: int, outcome: tuple[str, Any, int]) -> None:
        if outcome[0] == "error" and self.s.is_harmless:
            raise Violation(f"op {seq} fails, although nobody is lost: {outcome}")
        before = self.told.setdefault((n, seq), outcome)
        if before != outcome:
            raise Violation(f"I5: node {n} was told {before} of op {seq}, and now {outcome}")

    def settle(self) -> None:
        """Watermarks arrive as early as they can: a copy goes once every voter has the result."""
        news = not self.s.slow
        while news:
            news = False
            marks = {n: self.agents[n].watermark for n in self.live()}
            for n in self.live():
                for m, mark in marks.items():
                    if m != n:
                        got = self.agents[n].learn_watermark(name(m), mark)
                        news = news or bool(got)
                        self.carry_out(n, got)

    def call(self, rank: int, seq: int) -> None:
        view, n = self.view(rank), self.s.rank_node[rank]
        self.called.add((rank, seq))
        what, told, _ = self.told.get((n, seq), ("", "", 0))
        failed = self.agents[n].failure(seq)
        if what == "error" and (failed is None or failed.error != told):
            raise Violation(f"I5: node {n} does not know the error of op {seq} any more")
        call = call_of(KINDS[self.s.kinds[seq]], view)
        self.carry_out(n, self.agents[n].call(seq, f"r{rank}", call))

    # What must hold

    def check(self) -> None:
        """Raise a :class:`Violation` where survivors have different outcomes.

        An outcome says what view its ranks have from then on, so these are the same, too (I11).
        """
        survivors = [n for n in self.live() if not self.excluded(n)]
        for k in range(len(self.s.kinds)):
            ends = {self.told[n, k] for n in survivors if (n, k) in self.told}
            if len(ends) > 1:
                raise Violation(f"I1: op {k} has several outcomes among {survivors}: {ends}")
        self._check_floors(survivors)
        active = sorted(self.completed_in)
        for i, a in enumerate(active):
            for b in active[i + 1 :]:
                if a not in self.ancestors(b) and b not in self.ancestors(a):
                    raise Violation(f"I2: terms {a} and {b} are both active")

    def _check_floors(self, survivors: list[int]) -> None:
        """What a node believes to be final everywhere is."""
        known = max((self.agents[n].floor for n in survivors), default=-1)
        for k in range(min(known + 1, len(self.s.kinds))):
            for n in survivors:
                me = self.agents[n]
                entry = me.ops.get(k)
                is_final = (n, k) in self.told or (entry is not None and entry.is_final)
                if name(n) in me.epoch.nodes and not is_final:
                    raise Violation(f"I7: op {k} is taken for final, but not on node {n}: {entry}")

    def check_end(self) -> None:
        """Nothing more must happen: every op that a survivor's rank has called has ended."""
        if self.record is not None and not self.orch:
            voters = self.voters(self.record)
            if not all(self.alive[n] for n in voters):
                return  # the death of a node needs the orchestrator
        for n in self.live():
            me = self.agents[n]
            if me.frozen:
                raise Violation(f"I4: node {n} stays frozen")
            for rank, k in self.called:
                mine = self.s.rank_node[rank] == n and rank not in self.dead
                if mine and (n, k) not in self.told:
                    raise Violation(f"I4: op {k} never ends on node {n}: {me.ops.get(k)}")


def _content(report: Report) -> object:
    """What a decision may depend on. A node can report before or after a death."""
    if (known := report.__dict__.get("_content")) is None:
        ops = tuple(
            (seq, op.state, op.stamp, tuple((s, call.view) for s, call in op.calls.items()))
            for seq, op in report.ops.items()
        )
        known = hash((report.epoch.stamp, tuple(report.dead), report.floor, ops))
        report.__dict__["_content"] = known
    return known


def _decision(install: Install) -> object:
    if (known := install.__dict__.get("_content")) is None:
        known = hash((install.epoch, install.floor, tuple(install.outcomes.items())))
        install.__dict__["_content"] = known
    return known
