"""Each rule of the orchestrator is needed: without it the search finds what it was there for."""

from __future__ import annotations

import pytest

from tests.orchestrator.search import detector_mutants, mutants

MOST = 6000

pytestmark = pytest.mark.long


@pytest.mark.parametrize("rule", mutants.CASES)
def test_the_search_misses_a_rule_of_the_record_that_is_switched_off(rule: str) -> None:
    found = mutants.CASES[rule].search(MOST)
    assert found.problem, f"{found.states} states of '{mutants.CASES[rule].scenario}' show nothing"


@pytest.mark.parametrize("rule", detector_mutants.CASES)
def test_the_search_misses_a_rule_of_the_detector_that_is_switched_off(rule: str) -> None:
    found = detector_mutants.CASES[rule].search(MOST)
    assert found.problem, (
        f"{found.states} states of '{detector_mutants.CASES[rule].trial}' show nothing"
    )
