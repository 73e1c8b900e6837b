"""Larger groups with more ops, through orders of events that hypothesis makes up."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.survival.happenings import actions, follow
from tests.core.survival.scenario import KINDS, Scenario
from tests.core.survival.world import World

OPS = 4
FEW = st.integers(0, 2)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Four to six nodes, some with a second rank that may die; the last ranks may come later."""
    nodes = draw(st.integers(4, 6))
    more = draw(st.lists(st.integers(0, nodes - 1), max_size=2))
    ranks = (*range(nodes), *more)
    joiners = tuple(range(len(ranks) - draw(FEW), len(ranks)))
    calls = [(rank, seq) for rank in range(len(ranks)) for seq in range(OPS)]
    late: Any = draw(st.sets(st.sampled_from(calls), max_size=6))
    # A rank calls its ops in order, so what follows a late call is late, too.
    late = {(r, k) for r, k in calls if any(r == other and k >= seq for other, seq in late)}
    commits = draw(st.booleans()) and bool(joiners)
    return Scenario(
        "any",
        nodes,
        ranks,
        tuple(draw(st.lists(st.sampled_from(list(KINDS)), min_size=OPS, max_size=OPS))),
        raises=draw(st.booleans()),
        min_world=draw(st.sampled_from([1, 1, min(nodes - 1, len(ranks) - len(joiners))])),
        mortal=tuple(range(nodes, len(ranks))),
        late=tuple(sorted(late, key=lambda each: (each[1], each[0]))),
        slow=draw(st.booleans()),
        crashes=draw(FEW),
        rank_deaths=draw(FEW),
        false=draw(st.integers(0, 1)),
        losses=draw(st.integers(0, 1)),
        verdicts=draw(FEW),
        again=draw(FEW),
        orch_crashes=draw(st.integers(0, 1)),
        joiners=joiners,
        max_world=len(ranks) if joiners else None,
        commits=(1, 3) if commits else (),
        quorum=draw(st.sampled_from([None, None, 2, len(ranks) - 1])),
    )


class AnyOrder(RuleBasedStateMachine):
    """Each step is one thing that can happen; then what must happen does."""

    world: World

    @initialize(scenario=scenarios())
    def begin(self, scenario: Scenario) -> None:
        self.world = World(scenario)

    @rule(pick=st.integers(0, 200), faulty=st.booleans())
    def step(self, pick: int, *, faulty: bool) -> None:
        """Something happens: a fault, if one is left and wanted."""
        self.take(pick, faulty=faulty)

    def take(self, pick: int, *, faulty: bool) -> bool:
        options = [each for each in actions(self.world) if each[1] == faulty]
        if options:
            _, _, change = options[pick % len(options)]
            self.world = follow(self.world, change)
        return bool(options)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            picks = count()
            while self.take(next(picks), faulty=False):
                pass
            self.world.check_end()


AnyOrder.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyOrder = AnyOrder.TestCase
