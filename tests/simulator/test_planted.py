"""Each fault of an earlier version, planted again, is found by a story."""

from __future__ import annotations

import pytest

from tests.simulator.planted import FAULTS
from tests.simulator.story import stopped_leaders
from tests.simulator.test_simulator import run_simulator

pytestmark = pytest.mark.long


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_story(fault: str) -> None:
    told = run_simulator("--fault", fault, "--seed", str(FAULTS[fault].seed))
    assert told.returncode == 1, f"the story shows nothing: {told.stdout}\n{told.stderr}"


def test_the_stories_of_planted_faults_end_well_without_them() -> None:
    for planted in FAULTS.values():
        kind = ("--leaders",) if planted.draw is stopped_leaders else ()
        told = run_simulator("--seed", str(planted.seed), *kind)
        assert not told.returncode, told.stdout
