"""Each rule of the orchestrator is needed: without it the search finds what it was there for."""

from __future__ import annotations

import pytest

from tests.orchestrator.search import jury_mutants, mutants

MOST = 6000

pytestmark = pytest.mark.long


@pytest.mark.parametrize("rule", mutants.CASES)
def test_the_search_misses_a_rule_of_the_record_that_is_switched_off(rule: str) -> None:
    found = mutants.CASES[rule].search(MOST)
    assert found.problem, f"{found.states} states of '{mutants.CASES[rule].scenario}' show nothing"


@pytest.mark.parametrize("rule", jury_mutants.CASES)
def test_the_search_misses_a_rule_of_the_jury_that_is_switched_off(rule: str) -> None:
    found = jury_mutants.CASES[rule].search(MOST)
    assert found.problem, (
        f"{found.states} states of '{jury_mutants.CASES[rule].trial}' show nothing"
    )
