"""Each fault of an earlier version, planted again, is found by a story."""

from __future__ import annotations

import pytest

from tests.simulator.planted import FAULTS
from tests.simulator.test_simulator import run_simulator

pytestmark = pytest.mark.long


FOUND = {name: str(each.seed) for name, each in FAULTS.items() if each.seed is not None}


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_by_its_story(fault: str) -> None:
    told = run_simulator("--fault", fault, "--seed", FOUND[fault])
    assert told.returncode == 1, f"the story shows nothing: {told.stdout}\n{told.stderr}"


def test_the_stories_of_planted_faults_end_well_without_them() -> None:
    for seed in FOUND.values():
        told = run_simulator("--seed", seed)
        assert not told.returncode, told.stdout
