"""Whatever happens to nodes and to the store: no two halves of a group, and every op ends.

The search itself: ``python -m tests.orchestrator.search``.
"""

from __future__ import annotations

import pytest

from tests.orchestrator.search import __main__ as command
from tests.orchestrator.search.detector_happenings import game_of
from tests.orchestrator.search.detector_world import Trial
from tests.orchestrator.search.scenarios import DEEP, SCENARIOS, StoreScenario
from tests.orchestrator.search.trials import LONG_TRIALS, TRIALS
from tests.support.state_search import Found, explore_game, walk_game

STATES, STEPS = 300, 900


def way_of(found: Found) -> str:
    return "\n".join([found.problem, *found.way])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_the_nearest_states_of_a_group_and_its_record_keep_what_is_promised(
    scenario: StoreScenario,
) -> None:
    found = explore_game(scenario.game(), STATES)
    assert not found.problem, way_of(found)
    assert found.states > STATES or found.whole


@pytest.mark.long
@pytest.mark.parametrize("scenario", [*SCENARIOS[2:], *DEEP], ids=lambda each: each.name)
def test_long_walks_with_losses_of_the_record_keep_what_is_promised(
    scenario: StoreScenario,
) -> None:
    found = walk_game(scenario.game(), STEPS, seed=1)
    assert not found.problem, way_of(found)
    assert found.states >= STEPS


@pytest.mark.parametrize("trial", TRIALS, ids=lambda each: each.name)
def test_the_nearest_states_of_a_trial_evict_only_whom_they_must(trial: Trial) -> None:
    found = explore_game(game_of(trial), STATES)
    assert not found.problem, way_of(found)


@pytest.mark.long
@pytest.mark.parametrize("trial", [*TRIALS, *LONG_TRIALS], ids=lambda each: each.name)
def test_long_trials_end_with_all_evicted_who_are_gone_and_nobody_else(trial: Trial) -> None:
    found = walk_game(game_of(trial), STEPS, seed=1)
    assert not found.problem, way_of(found)


def test_the_command_searches_what_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["two nodes, false suspicions", "a dead link", "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["two nodes, false suspicions", "a dead link"]
