"""Stories of faults, each drawn from its number: no promise to survivors is broken in any.

They are told in a process of their own, in which sets have the same order whenever it is started:
a story that fails here fails everywhere, as ``python -m tests.simulator --seed N --story``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulator.trial import HASHES
from tests.support.tiers import long

MENDED = {
    6289: "a killed node's links were taken for dead before its silence was decided",
    771: "a killed node's last words were read late, and its links taken for dead",
    30020: "a suspicion was dropped that was made while its node was ended in no group",
    3409: "a node opened a group again that it had closed, with ranks that had left",
    10054: "a second opening of the group was taken for the first one, and its ranks not woken",
    106: "a node without ranks closed a group that went on, because another one was left out of it",
    1436: "a node opened a group again that all ranks had left, before the others knew of that",
    30081: "the leader had no rank, and closed the group when a node came that was once left out",
    20073: "terms that the store had lost were taken for later ones of the same number",
    364: "a node that was there at the opening took part by a term, without the plan",
    263: "a node took part in a group again, as a store had lost the term that left it out",
    50942: "a store that had lost all opened a group by the number of one that still ran",
    102728: "a store that had lost all gave a new group the numbers of one that ran",
    200074: "a verdict was lost with the records of its groups",
    50361: "a node kept an opening that was unknown to the store when it opened the name anew",
}
"""Stories that once went wrong, by number, with what was wrong."""
LONGEST_SECONDS = 600

pytestmark = pytest.mark.timeout(LONGEST_SECONDS)


def run_simulator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator", *arguments],
        env={**os.environ, "PYTHONHASHSEED": HASHES},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )


def simulate(*arguments: str) -> str:
    """Return what the command says, which is the shortest story where one goes wrong."""
    told = run_simulator(*arguments)
    assert not told.returncode, f"{told.stdout}\n{told.stderr}"
    return told.stdout


@pytest.mark.parametrize(("first", "stories"), [(0, 30), long(30, 30), long(100, 60)])
def test_no_story_of_kills_stops_partitions_and_losses_breaks_a_promise(
    first: int, stories: int
) -> None:
    assert "nothing wrong" in simulate("--first", str(first), "--stories", str(stories))


def test_no_story_of_stopped_leaders_breaks_a_promise() -> None:
    """In number 28 a node that went on cost another one its place, by words under way."""
    assert "nothing wrong" in simulate("--leaders", "--first", "12", "--stories", "17")


@pytest.mark.parametrize(("first", "stories"), [(0, 20), long(20, 100)])
def test_no_story_of_ops_that_do_not_wait_for_late_ranks_breaks_a_promise(
    first: int, stories: int
) -> None:
    """Those who come late are told what the others were told."""
    said = simulate("--quorum", "--first", str(first), "--stories", str(stories))
    assert "nothing wrong" in said


def test_the_stories_that_went_wrong_once_end_well() -> None:
    assert "nothing wrong" in simulate("--seeds", *map(str, MENDED))


def test_a_story_is_the_same_whenever_it_is_told() -> None:
    assert simulate("--seed", "7", "--story") == simulate("--seed", "7", "--story")
