"""Nodes that run the real machines, and an orchestrator that runs the real rules over a store.

What the orchestrator does is :func:`step` of a group's membership and :func:`may_evict`; each write
is made of the newest state, as compare-and-set sees to it. The store may lose what was written
last, or everything. Nodes register in two steps: what a node holds is on its way for a while.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

from allfold_agent.groups.registry import with_seats
from allfold_core.survival.plans import GroupPolicy, first_epoch, first_record
from allfold_core.survival.records import Term
from allfold_core.survival.term_record import (
    Life,
    TermRecord,
)
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    GroupState,
    Join,
    LossShown,
    NodesLost,
    StoreLife,
)
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.terms import may_evict, outgrow, store_life
from tests.core.survival.scenario import Mutant, Scenario, name, number
from tests.core.survival.world import World
from tests.orchestrator.builders import GROUP, join, node, play
from tests.orchestrator.search.losses import Losses
from tests.support.state_search import Violation

UNTIL = 100.0
BEFORE, AFTER = 0.0, 200.0
HOW = "was lost"


class Saved(NamedTuple):
    """A snapshot of the store.

    Attributes:
        over: the lives that are over according to their records.
    """

    state: GroupState
    over: frozenset[Life]


def join_of(scenario: Scenario, rank: int, incarnation: int) -> Join:
    """Return the request of a rank for a seat."""
    return join(
        rank,
        node(name(scenario.rank_node[rank]), str(incarnation)),
        of=len(scenario.founders),
        session=f"r{rank}",
        on_loss="raise" if scenario.raises else "shrink",
        min_world=scenario.min_world,
        max_world=scenario.max_world,
        joins="commit" if scenario.commits else "any",
        generation=1,
    )


class StoreWorld(World):
    """All nodes, and the orchestrator over its store.

    Attributes:
        saved: what the store had at earlier times.
        opened: what it had first.
        seen: the newest generation that the orchestrator has seen since it was started.
        announced_to: (node, generation, term) that control links carry.
        linked: the nodes that have registered since they had to the last time.
        asked: what a node has said of itself in a registration that is not answered yet; ``None``
            where it is not in the group.
        lives: of each node, the number of its incarnation.
        entries: the records that ranks are given with their seats, on their way to them.
        held: of each node, the record of its term.
        heard_in: of each node, the generation in which its term was announced to it.
        done_in: (node, term) of ops that were computed.
    """

    def __init__(self, scenario: Scenario, losses: Losses, mutant: Mutant) -> None:
        joins = [
            replace(join_of(scenario, rank, 1), rank=place)
            for place, rank in enumerate(scenario.founders)
        ]
        self._hold(play(joins)[0])
        assert self.group_state.current is not None
        plan = self.group_state.current.plan
        self.policy = GroupPolicy(plan.group, plan.options)
        first = first_record(plan)
        super().__init__(scenario, mutant, (first.term, first_epoch(plan)))
        self.store, self.seen = StoreLife(1, "0"), 1
        self.over: frozenset[Life] = frozenset()
        self.saved: tuple[Saved, ...] = ()
        self.opened = self.group_state
        self.announced_to: set[tuple[int, int, int]] = set()
        self.linked = frozenset(range(scenario.nodes))
        self.asked: dict[int, AgentRegisters | None] = {}
        self.lives = [1] * scenario.nodes
        self.entries: dict[int, TermRecord] = {}
        self.held = [first] * scenario.nodes
        self.heard_in = [1] * scenario.nodes
        self.done_in: set[tuple[int, int]] = set()
        self.budget |= vars(losses)

    def copy(self) -> Self:
        other = super().copy()
        other.announced_to = set(self.announced_to)
        other.asked, other.held = dict(self.asked), list(self.held)
        other.lives, other.entries = list(self.lives), dict(self.entries)
        other.heard_in = list(self.heard_in)
        other.done_in = set(self.done_in)
        return other

    def key(self) -> object:
        saved = self.saved if self.budget["back"] else ()
        return (
            super().key(),
            (self.store, self.seen, self._digested, self.over, self.linked),
            tuple((_digest(state, term_record(state)), over) for state, over in saved),
            frozenset(self.announced_to),
            tuple(
                (n, each and (each.held.term, each.held.seats, each.is_out))
                for n, each in sorted(self.asked.items())
            ),
            tuple(self.heard_in),
            frozenset(self.done_in),
            tuple(self.lives),
            frozenset((rank, r.term, r.generation) for rank, r in self.entries.items()),
        )

    def life_of(self, n: int) -> Life:
        """The life of a node that its group knows, or is to know."""
        return (name(n), str(self.lives[n]))

    # The store

    def _hold(self, state: GroupState) -> None:
        self.group_state, self.term_record = state, term_record(state)
        self._digested = _digest(state, self.term_record)

    @property
    def now(self) -> float:
        """The grace is over when every living agent has registered, and not earlier."""
        late = any(alive and n not in self.linked for n, alive in enumerate(self.alive))
        return BEFORE if late else AFTER

    def write(self, state: GroupState, *parents: Term) -> None:
        """Write a group; its term is announced to all who have registered with this store."""
        if state is self.group_state:
            return
        self.save()
        before = self.term_record
        self._hold(state)
        record = self.term_record
        if record is None:
            return
        made_from = [*parents, *([before.term] if before else [])]
        t = self.number_of(record.term, tuple(made_from))
        self.announced_to |= {(n, self.store.generation, t) for n in self.linked}

    def save(self) -> None:
        if self.budget["back"]:
            now = Saved(self.group_state, self.over)
            if now not in self.saved:
                self.saved += (now,)

    def number_of(self, term: Term, made_from: tuple[Term, ...]) -> int:
        if term not in self.terms:
            self.terms.append(term)
            self.parents.append(tuple({self.terms.index(each) for each in made_from}))
        return self.terms.index(term)

    def may_evict(self, n: int, *, is_proven: bool) -> bool:
        record = self.term_record
        found = [record] if record is not None and record.has(self.life_of(n)) else []
        return bool(found) and may_evict(
            found, name(n), is_proven=is_proven, now=self.now, generation=self.store.generation
        )

    def others_go_on(self, n: int) -> bool:
        """Return True if a voter besides this one lives, and is to stay: else the group is over."""
        voters = voters_of(self.term_record) if self.term_record else []
        return any(m != n and self.alive[m] and self.life_of(m) not in self.over for m in voters)

    def end_life(self, n: int) -> None:
        """A life is over: first it is noted, then its groups go on without it."""
        self.save()
        self.over |= {self.life_of(n)}

    def clear_up(self, n: int) -> None:
        record = self.term_record
        assert record is not None
        known = (name(n), record.voters[name(n)].incarnation)
        state, _ = step(self.group_state, NodesLost({known: HOW}, self.store, UNTIL))
        self.write(state)

    def is_outlived(self, n: int) -> bool:
        """Return True if the record has a life of a node that is over, or was followed by one."""
        record = self.term_record
        if record is None or name(n) not in record.voters:
            return False
        has_another = not record.has(self.life_of(n)) and n in self.linked
        return has_another or (name(n), record.voters[name(n)].incarnation) in self.over

    # Registrations

    def ask(self, n: int) -> None:
        """A node says what it holds: it is to take no older term from here on."""
        me = self.agents[n]
        if n not in self.inside:
            self.asked[n] = None
            return
        me.registers()
        held = self.held[n] if self.s.max_world is None else self._with_seats(n)
        self.asked[n] = AgentRegisters(
            self.life_of(n), me.generation, held, self.store, UNTIL, is_out=me.out
        )

    def _with_seats(self, n: int) -> TermRecord:
        """Return the record that a node holds, with the seats that are taken now."""
        ranks = {*self.s.founders, *self.ready} - self.dead - self.left
        here = {f"r{rank}" for rank in ranks if self.s.rank_node[rank] == n}
        return with_seats(self.held[n], self.agents[n].epoch, name(n), here)

    def is_missed(self, n: int) -> bool:
        """A record waits for a node that had registered before there was one again.

        Or there is none, and the node takes part in the group.
        """
        record = self.term_record
        if record is None and self.s.max_world is not None:
            return n in self.live()
        recall = record and record.recall
        return bool(
            record and recall and record.has(self.life_of(n)) and name(n) not in recall.registered
        )

    def answer(self, n: int) -> None:
        report = self.asked.pop(n)
        if report is None:
            self.linked |= {n}
            self.agents[n].registered(self.store.generation)
            return
        store = self.store
        while True:
            state, said = step(self.group_state, replace(report, store=store))
            (answer,) = [each for each in said if isinstance(each, AgentRegistered | LossShown)]
            self.write(state, report.held.term)
            if isinstance(answer, AgentRegistered):
                break
            store = outgrow(store, max(answer.reported, store.generation))
            self.begin_generation(store)
        self.linked |= {n}
        self.agents[n].registered(store.generation)
        if answer.is_out:
            self.agents[n].evict()
        record = self.term_record
        if record is not None:
            self.announced_to.add((n, store.generation, self.terms.index(record.term)))

    def break_links(self) -> None:
        """Break all control links, and lose the messages on them."""
        self.linked = frozenset()
        self.asked.clear()
        self.announced_to.clear()
        self.entries.clear()

    def begin_generation(self, store: StoreLife) -> None:
        """All nodes are to register anew."""
        self.store, self.seen, self.linked = store, store.generation, frozenset()

    # Losses of the store

    def go_back(self, to: Saved) -> None:
        self.budget["back"] -= 1
        self._hold(to.state)
        self.over = to.over
        self._renamed(self.store)

    def lose_all(self) -> None:
        self.budget["empty"] -= 1
        self._forget()
        self._renamed(None)

    def restart(self) -> None:
        self.budget["restarts"] -= 1
        self._forget()
        self.seen = 0
        self.break_links()
        self._renamed(None)

    def _forget(self) -> None:
        self._hold(GroupState(GROUP))
        self.over = frozenset()

    def _renamed(self, stored: StoreLife | None) -> None:
        """The server was started anew: its generation is above all that were seen."""
        name_of = f"{int(self.store.run_id) + 1}"
        store = store_life(stored, name_of)
        if store.generation <= self.seen:
            store = outgrow(store, self.seen)
        self.begin_generation(store)

    # What must hold

    def completes(self, n: int, t: int) -> None:
        self.done_in.add((n, t))

    def check(self) -> None:
        super().check()
        self._check_actives()
        self._check_stamps()
        for n in self.inside:
            if self.held[n].term != self.agents[n].term:
                raise Violation(f"node {n} has no record of its term")

    def _check_actives(self) -> None:
        """I2: of two terms in which living nodes have completed ops, one descends from the other.

        What only nodes know that are dead, or out, binds nobody.
        """
        active = sorted({t for n, t in self.done_in if n in self.live()})
        for a in active:
            for b in active:
                if a < b and a not in self.ancestors(b) and b not in self.ancestors(a):
                    raise Violation(
                        f"I2: terms {self.terms[a]} and {self.terms[b]} are both active"
                    )

    def _check_stamps(self) -> None:
        taken: dict[tuple[int, int], Term] = {}
        for n in self.live():
            term = self.agents[n].term
            if taken.setdefault((term.number, term.generation), term).voters != term.voters:
                raise Violation(f"I8: living nodes hold two terms {term.number}: {taken}")

    def check_end(self) -> None:
        super().check_end()
        record, live = self.term_record, self.live()
        if record is None:
            return
        if not record.is_trusted(self.now):
            raise Violation("I4: the record is never trusted again")
        for n in {*voters_of(record), *live}:
            if n not in live:
                raise Violation(f"I4: node {n} is gone, and is still a voter at the end")
            if self.agents[n].term != record.term:
                raise Violation(f"I4: node {n} never comes to term {record.term}")
        if self.s.max_world is not None:
            self._check_seats(record, self.s.max_world)

    def _check_seats(self, record: TermRecord, most: int) -> None:
        """The record has a seat for every rank that lives, and for nobody else."""
        seated = {int(seat.session[1:]) for seat in record.seats}
        gone = self.dead | self.left
        for rank, n in enumerate(self.s.rank_node):
            if rank in seated and (rank in gone or n not in self.live()):
                raise Violation(f"rank {rank} is gone, and still has a seat at the end")
            is_there = n in self.live() and rank in {*self.s.founders, *self.ready} - gone
            if is_there and rank not in seated:
                raise Violation(f"rank {rank} is in the group, and has no seat")
            waits = self.alive[n] and rank in self.s.joiners and rank not in self.ready | gone
            if waits and len(seated) < most:
                raise Violation(f"I4: rank {rank} never gets a seat")


def _digest(state: GroupState, record: TermRecord | None) -> object:
    """Return everything in the store that the future can depend on."""
    current = None if state.current is None else tuple(state.current.present)
    forming = None if state.forming is None else tuple(state.forming.seats)
    known = (state.last_opening, state.recalled, current, forming)
    if record is None:
        return known
    recall = record.recall and record.recall.registered
    return (*known, record.term, record.seats, record.generation, recall)


def voters_of(record: TermRecord) -> list[int]:
    return sorted(map(number, record.term.voters))
