"""Each rule of the agreement is needed: without it the search finds what it was there for."""

from __future__ import annotations

import pytest

from tests.core.survival.mutants import CASES

MOST = 8000

pytestmark = pytest.mark.long


@pytest.mark.parametrize("rule", CASES)
def test_the_search_misses_a_rule_that_is_switched_off(rule: str) -> None:
    found = CASES[rule].search(MOST)
    assert found.problem, f"{found.states} states of '{CASES[rule].scenario}' show nothing"
    assert found.way
