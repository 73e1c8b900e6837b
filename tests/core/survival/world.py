"""A world of nodes that run the real machines, for a search through everything that can happen.

Every message may take any time, messages overtake each other, and what a dead node has sent may
arrive or be lost. A frame is "a node has contributed to an op in an epoch": that its content needs
all contributions, however the schedule routes them, is what all strategies have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

from allfold_core.errors import AllfoldError, PeerMissing
from allfold_core.survival import instructions as agent
from allfold_core.survival.admission import OTHERS
from allfold_core.survival.leader_machine import LeaderMachine
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Install,
    Reason,
    Report,
    Wishes,
    is_replicated,
)
from tests.core.survival.calls import call_of
from tests.core.survival.digests import digest_of
from tests.core.survival.invariants import (
    check_end,
    check_hand_out,
    check_outcomes,
    check_start,
    note_seats,
)
from tests.core.survival.quorums import Quorums, note_call_in_place, with_quorum
from tests.core.survival.scenario import FAITHFUL, KINDS, Mutant, Scenario, name, number
from tests.support.state_search import Violation


class WishesOf(NamedTuple):
    """The wishes of a node's ranks, on their way to a leader."""

    node: int
    join: tuple[str, ...]
    leave: tuple[str, ...]
    at_boundary: tuple[tuple[str, int], ...]


News = tuple[int, str | Doubt | WishesOf]
"""A message on its way to the leader of a term: DOWN, DOUBT, or wishes."""


def judge_any(
    seq: int, _epoch: Epoch, _reports: object, doubt: Doubt | None
) -> AllfoldError | None:
    """A verdict on whatever missed its deadline."""
    late = doubt is not None and doubt.reason is Reason.DEADLINE
    return PeerMissing(f"op {seq} was late") if late else None


def _first(scenario: Scenario) -> tuple[Term, Epoch]:
    """The term and the epoch with which a group is opened."""
    seats = tuple(
        Seat(f"r{rank}", name(scenario.rank_node[rank]), number)
        for number, rank in enumerate(scenario.founders)
    )
    nodes = tuple(map(name, scenario.first_nodes))
    return Term(1, 0, nodes, (1,) * len(nodes)), Epoch(Stamp(1, 0, 0), 0, seats, seated=len(seats))


class World:
    """All nodes, the orchestrator's record, and what is under way between them.

    Attributes:
        terms: all that were ever decided; a term is named by its place in this list.
        parents: of each term, those that it was made from.
        announced: of each term, the generations of the store that have announced it.
        record: the orchestrator's term; ``None`` while it is lost.
        reported: the nodes that have registered with the present store.
        leaders: by term, on nodes that live.
        epochs: those that were decided, by stamp.
        inside: the nodes that have a part in the group, or had one.
        granted: the ranks that were given a seat, each with the term that let its node in.
        ready: those that are known to their node to have one.
        left: the ranks that have left at a commit.
        wanted: those that want to.
        views: the epochs with which ranks came in, or went on after a commit.
        seats: those that each node has known, by number.
        at_boundary: by rank that waits at a boundary, the op that it calls next, and the boundary.
        passed: (rank, op): the commits before ops that are over.
        past: (rank, boundary, op): where a rank has waited before an op, and does not again.
        called: (rank, op): the calls that were made.
        told: by node and op, the outcome that its ranks have got.
        started: by op and epoch, the nodes that have contributed.
        closings: by op and epoch, the nodes that have sent closing signals.
        sent: DOWN, DOUBT and wishes by term, on their way to its leader.
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
        self.policy = mutant.policy("g", scenario.options)
        self.terms: list[Term] = [term]
        self.parents: list[tuple[int, ...]] = [()]
        self.announced: list[set[int]] = [{0}]
        self.record: int | None = 0
        self.recalled = False
        self.inside: set[int] = set(scenario.first_nodes)
        self.reported: set[int] = set(everyone)
        self.generation = 0
        self.orch = scenario.orchestrator
        self.alive = [True] * scenario.nodes
        self.agents = [mutant.agent(name(n), self.policy, term, epoch) for n in everyone]
        self.leaders: dict[int, LeaderMachine] = {}
        self.lead(term, gathering=False)
        self.dead: set[int] = set()
        self.granted: dict[int, int] = {}
        self.ready: set[int] = set()
        self.left: set[int] = set()
        self.wanted: frozenset[int] = frozenset()
        self.views: dict[int, int] = {}
        self.seats: dict[tuple[int, int], Seat] = {}
        self.at_boundary: dict[int, tuple[int, int]] = {}
        self.passed: set[tuple[int, int]] = set()
        self.past: set[tuple[int, int, int]] = set()
        self.called: set[tuple[int, int]] = set()
        self.told: dict[tuple[int, int], tuple[str, Any, int]] = {}
        self.started: dict[tuple[int, Stamp], set[int]] = {}
        self.closings: dict[tuple[int, Stamp], set[int]] = {}
        self.reports: dict[tuple[int, int, int], Report] = {}
        self.installs: dict[tuple[int, int], Install] = {}
        self.epochs = {epoch.stamp: epoch}
        self.sent: set[News] = set()
        self.arrived: set[News] = set()
        self.completed_in: set[int] = set()
        self.quorums = Quorums()
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
        for n in s.first_nodes:
            note_seats(self, n, epoch)
        for seq in range(len(s.kinds)):
            for rank in s.founders:
                if (rank, seq) not in s.later_calls and rank not in s.silent:
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
        other.inside, other.granted = set(self.inside), dict(self.granted)
        other.ready, other.left = set(self.ready), set(self.left)
        other.views, other.seats = dict(self.views), dict(self.seats)
        other.at_boundary = dict(self.at_boundary)
        other.passed, other.past = set(self.passed), set(self.past)
        other.dead, other.called = set(self.dead), set(self.called)
        other.told = dict(self.told)
        other.started = {key: set(nodes) for key, nodes in self.started.items()}
        other.closings = {key: set(nodes) for key, nodes in self.closings.items()}
        other.reports, other.installs = dict(self.reports), dict(self.installs)
        other.epochs = dict(self.epochs)
        other.sent, other.arrived = set(self.sent), set(self.arrived)
        other.completed_in = set(self.completed_in)
        other.quorums = self.quorums.copy()
        other.budget = dict(self.budget)
        return other

    def key(self) -> object:
        """Equal for states with equal futures."""
        return digest_of(self)

    # Small questions

    def live(self) -> list[int]:
        """The nodes that run and are not out."""
        return [n for n in sorted(self.inside) if self.alive[n] and not self.agents[n].out]

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

    def life(self, n: int, t: int) -> int:
        """The number of the term that let a node into a term; -1 if it is not there."""
        term = self.terms[t]
        return dict(zip(term.voters, term.joined, strict=True)).get(name(n), -1)

    def excluded(self, n: int) -> bool:
        """Return True if some term that was ever decided leaves the node out as it is now."""
        mine = self.life(n, self.term_of(n))
        return any(
            self.life(n, t) != mine and any(self.life(n, parent) == mine for parent in parents)
            for t, parents in enumerate(self.parents)
        )

    def first_op(self, rank: int) -> int:
        """The first op of a rank; of one that is not in the group yet, behind all."""
        me = self.agents[self.s.rank_node[rank]]
        session = f"r{rank}"
        if rank in self.s.founders:
            return 0
        return me.epoch.since_of(session) if session in me.epoch.sessions else len(self.s.kinds)

    def view(self, rank: int) -> int:
        """The newest epoch that a rank knows: from the outcomes of what it has called."""
        known = (outcome[2] for _, outcome in self.told_of(rank))
        return max((self.views.get(rank, 0), *known))

    def told_of(self, rank: int) -> Iterator[tuple[int, tuple[str, Any, int]]]:
        """Yield the ops that a rank has called and that have an outcome, each with that."""
        n = self.s.rank_node[rank]
        for (at, seq), outcome in self.told.items():
            if at == n and (rank, seq) in self.called:
                yield seq, outcome

    def boundary_of(self, rank: int, seq: int) -> int:
        """The boundary at which a rank is to stop before an op, from its newest result; 0: none."""
        got = [(k, outcome[1]) for k, outcome in self.told_of(rank) if outcome[0] == "result"]
        announced = self.epochs[max(got)[1]].boundary if got else 0
        return max(announced, self.boundary_of_too_few(rank, seq))

    def boundary_of_too_few(self, rank: int, seq: int) -> int:
        """The boundary at which a rank waits, as it knows an epoch with too few; 0: none."""
        view = self.view(rank)
        known = [each for each in self.epochs.values() if each.ordinal == view]
        boundaries = {each.boundary for each in known if OTHERS in each.waiting}
        return max((each for each in boundaries if (rank, each, seq) not in self.past), default=0)

    def may_call(self, rank: int, seq: int) -> bool:
        """Return True if an op is the next one of a rank, and no commit before it holds it up."""
        if rank in self.dead or rank in self.left or (rank, seq) in self.called:
            return False
        first = self.first_op(rank)
        if seq < first or not all((rank, each) in self.called for each in range(first, seq)):
            return False
        may_pass = seq not in self.s.commits or (rank, seq) in self.passed
        return may_pass and not self.boundary_of_too_few(rank, seq)

    def may_commit(self, rank: int, seq: int) -> bool:
        """Return True if a rank can come to the commit before an op: nothing is in flight there."""
        n, first = self.s.rank_node[rank], self.first_op(rank)
        if (rank, seq) in self.passed or rank in self.at_boundary or seq < first:
            return False
        if rank in self.dead or rank in self.left:
            return False
        earlier = range(first, seq)
        return all((rank, k) in self.called and (n, k) in self.told for k in earlier)

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
                check_start(self, n, each)
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
                check_hand_out(n, each.seq, self.epochs[each.stamp])
                self._tell(n, each.seq, ("result", each.stamp, self.epochs[each.stamp].ordinal))
            elif isinstance(each, agent.Refuse):
                self._tell(n, each.seq, ("error", each.error, each.ordinal))
            elif isinstance(each, agent.SendReport):
                report = each.report
                self.reports[self.terms.index(report.term), report.round, n] = report
            elif isinstance(each, agent.SendDoubt) and each.doubt.quorum:
                self.quorums.tell(n, each.doubt)
            elif isinstance(each, agent.SendDoubt):
                self.sent.add((self.term_of(n), each.doubt))
            elif isinstance(each, agent.CallInPlace):
                note_call_in_place(self, n, each)
            elif isinstance(each, agent.SendDown):
                self.sent |= {(self.term_of(n), session) for session, _ in each.dead}
            elif isinstance(each, agent.SendWishes):
                self._send_wishes(n, each.wishes)
            elif isinstance(each, agent.Installed):
                self._enter(n, each.epoch)
            elif isinstance(each, agent.LeaveBoundary):
                self._leave_boundary(n, each.sessions)

    def _send_wishes(self, n: int, wishes: Wishes) -> None:
        """The newest wishes of a node reach the leader last."""
        t = self.term_of(n)
        for news in (self.sent, self.arrived):
            news -= {
                (at, x) for at, x in news if isinstance(x, WishesOf) and (at, x.node) == (t, n)
            }
        boundaries = tuple(sorted(wishes.at_boundary.items()))
        self.sent.add((t, WishesOf(n, wishes.join, wishes.leave, boundaries)))

    def _enter(self, n: int, epoch: Epoch) -> None:
        note_seats(self, n, epoch)
        for rank in self.s.joiners:
            if f"r{rank}" in epoch.sessions_on(name(n)):
                self.views.setdefault(rank, epoch.ordinal)

    def _leave_boundary(self, n: int, sessions: Iterable[str]) -> None:
        """Ranks go on after a commit; those that wanted to leave are gone."""
        epoch = self.agents[n].epoch
        for session in sessions:
            rank = int(session[1:])
            seq, boundary = self.at_boundary.pop(rank)
            self.passed.add((rank, seq))
            self.past.add((rank, boundary, seq))
            self.views[rank] = max(epoch.ordinal, self.views.get(rank, 0))
            if session not in epoch.sessions:
                self.left.add(rank)

    def decided(self, epoch: Epoch) -> None:
        """A round has named an epoch, which may have been there before."""
        if self.epochs.setdefault(epoch.stamp, epoch) != epoch:
            raise Violation(f"epoch {epoch.stamp} is {self.epochs[epoch.stamp]}, and now {epoch}")

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
        if (rank, seq) in self.quorums.in_place:
            return  # its node has called in its place, and keeps the outcome for it
        what, told, _ = self.told.get((n, seq), ("", "", 0))
        failed = self.agents[n].failure(seq)
        if what == "error" and (failed is None or failed.error != told):
            raise Violation(f"I5: node {n} does not know the error of op {seq} any more")
        call = with_quorum(call_of(KINDS[self.s.kinds[seq]], view), self.s.quorum)
        self.carry_out(n, self.agents[n].call(seq, f"r{rank}", call))

    # What must hold

    def check(self) -> None:
        """Raise a :class:`Violation` if an invariant does not hold."""
        check_outcomes(self)

    def check_end(self) -> None:
        """Raise one if nothing more must happen, and something should have."""
        check_end(self)
