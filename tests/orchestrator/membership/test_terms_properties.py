"""Terms over any order of evictions, lost records, registrations and announcements."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allfold_core.survival.plans import first_record
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import AgentRegisters, StoreLife
from allfold_orchestrator.membership.terms import (
    evict,
    may_evict,
    recalled,
    register,
)
from tests.orchestrator.builders import ready

NODES = "abcd"
UNTIL = 100.0
BEFORE, AFTER = 0.0, 200.0


@dataclass
class Agent:
    """An agent, and the newest term that it has taken."""

    name: str
    held: TermRecord
    generation: int = 1
    is_alive: bool = True
    is_out: bool = False


@dataclass
class World:
    """A store, its earlier contents, the agents, and the announcements that are under way."""

    record: TermRecord | None
    store: StoreLife
    agents: dict[str, Agent]
    written: list[TermRecord] = field(default_factory=list)
    announced: list[tuple[int, TermRecord]] = field(default_factory=list)
    taken: dict[tuple[int, int, tuple[str, ...]], set[str]] = field(default_factory=dict)

    @property
    def now(self) -> float:
        """The grace is over when every living agent has registered, and not earlier."""
        late = any(
            agent.is_alive and not agent.is_out and agent.generation < self.store.generation
            for agent in self.agents.values()
        )
        return BEFORE if late else AFTER

    def write(self, record: TermRecord | None) -> None:
        self.record = record
        if record is not None:
            self.written.append(record)
            self.announced.append((self.store.generation, record))

    # What can happen

    def crash(self, name: str, _: int) -> None:
        self.agents[name].is_alive = False

    def evict(self, name: str, _: int) -> None:
        if self.record is not None and self.record.generation == self.store.generation:
            is_proven = not self.agents[name].is_alive
            if may_evict([self.record], name, is_proven=is_proven, now=self.now):
                self.write(evict(self.record, {(name, "1"): "lost"}) or self.record)

    def lose(self, _: str, choice: int) -> None:
        """The store is empty, or has what it had at some time before."""
        self.store = StoreLife(self.store.generation + 1, "")
        earlier = [None, *self.written][choice % (len(self.written) + 1)]
        self.record = earlier and recalled(earlier, self.store, UNTIL)

    def register(self, name: str, _: int) -> None:
        agent = self.agents[name]
        if not agent.is_alive or agent.generation == self.store.generation:
            return
        agent.generation = self.store.generation
        report = AgentRegisters(
            (name, "1"), agent.generation, agent.held, self.store, UNTIL, is_out=agent.is_out
        )
        answer = register(self.record, report)
        agent.is_out |= answer.is_out
        self.write(answer.record)

    def deliver(self, name: str, choice: int) -> None:
        agent = self.agents[name]
        if not self.announced or not agent.is_alive or agent.is_out:
            return
        generation, record = self.announced[choice % len(self.announced)]
        if generation != agent.generation or not record.term.may_follow(agent.held.term):
            return
        agent.held = record
        agent.is_out = name not in record.term.voters
        if not agent.is_out:
            self.take(agent)

    def take(self, agent: Agent) -> None:
        term = agent.held.term
        key = (term.number, term.generation, term.voters)
        self.taken.setdefault(key, set()).add(agent.name)

    # What must hold

    def effective(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """The terms that all of their voters have taken: only these can have decided anything."""
        return sorted(term for term, names in self.taken.items() if names == set(term[2]))


def world() -> World:
    current = ready(len(NODES)).current
    assert current is not None
    record = first_record(replace(current.plan, generation=1))
    made = World(record, StoreLife(1, ""), {name: Agent(name, record) for name in NODES})
    made.write(record)
    for agent in made.agents.values():
        made.take(agent)
    return made


ACTIONS = [World.crash, World.evict, World.lose, World.register, World.deliver]
WEIGHTED = [World.evict, World.register, World.deliver, World.deliver, *ACTIONS]
STEPS = st.lists(
    st.tuples(st.sampled_from(WEIGHTED), st.sampled_from(NODES), st.integers(0, 30)), max_size=60
)


@given(STEPS)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_of_two_terms_that_decided_something_one_always_has_the_nodes_of_the_other(
    steps: list[tuple[object, str, int]],
) -> None:
    """I2 and I10: never two halves of a group that both go on."""
    now = world()
    for action, name, choice in steps:
        action(now, name, choice)  # type: ignore[operator]
        effective = now.effective()
        for (older, _, before), (newer, _, after) in pairwise(effective):
            assert set(after) <= set(before)
            assert older < newer


@given(STEPS)
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_once_all_have_registered_the_record_is_trusted_and_all_its_living_voters_can_take_it(
    steps: list[tuple[object, str, int]],
) -> None:
    now = world()
    for action, name, choice in steps:
        action(now, name, choice)  # type: ignore[operator]
    for name in NODES:
        now.register(name, 0)
    if now.record is None:  # nobody is left to say what it was
        assert all(a.is_out or not a.is_alive for a in now.agents.values())
        return
    assert now.record.is_trusted(now.now)
    assert set(now.record.voters) == set(now.record.term.voters)
    for agent in now.agents.values():
        if agent.is_alive and not agent.is_out and agent.name in now.record.voters:
            term = now.record.term
            assert term == agent.held.term or term.may_follow(agent.held.term)
