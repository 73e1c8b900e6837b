"""Whatever happens, in whatever order: survivors agree, and every op ends.

The search itself: ``python -m tests.core.survival.search``.
"""

from __future__ import annotations

import pytest

from tests.core.survival.scenario import Scenario
from tests.core.survival.scenarios import DEEP, SCENARIOS
from tests.core.survival.search import explore, main, walk
from tests.support.state_search import Found
from tests.support.tiers import long, one_in

STATES, STEPS = 400, 1200
# Every other one, from the second on: they reach every branch.
CASES = [long(SCENARIOS[0]), *one_in(2, SCENARIOS[1:])]


def way_of(found: Found) -> str:
    return "\n".join([found.problem, *found.way])


@pytest.mark.parametrize("scenario", CASES, ids=lambda each: each.name)
def test_the_nearest_states_of_a_scenario_keep_what_is_promised(scenario: Scenario) -> None:
    found = explore(scenario, STATES)
    assert not found.problem, way_of(found)
    assert found.states > STATES or found.whole


@pytest.mark.long
@pytest.mark.parametrize("scenario", DEEP, ids=lambda each: each.name)
def test_long_walks_with_many_faults_keep_what_is_promised(scenario: Scenario) -> None:
    found = walk(scenario, STEPS, seed=1)
    assert not found.problem, way_of(found)
    assert found.states >= STEPS


def test_a_search_stops_when_its_time_is_over() -> None:
    assert not explore(SCENARIOS[0], 10**9, seconds=0.0).whole
    assert walk(DEEP[0], 10**9, 1, seconds=0.0).states == 0


def test_a_search_that_finds_something_shows_the_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SCENARIOS[0].name
    assert main([first, "--seconds", "0"]) == 0
    assert "cut off" in capsys.readouterr().out
    found = Found(7, False, "I1: two outcomes", ("node 0 crashes", "node 1 learns term 1"))
    monkeypatch.setattr("tests.core.survival.search.explore", lambda *_, **__: found)
    assert main([first]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATION" in shown
    assert "  2. node 1 learns term 1" in shown
