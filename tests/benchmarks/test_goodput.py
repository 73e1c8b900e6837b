"""The benchmark of goodput: its options, what it makes of logs, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.children import ROOT, environment
from benchmarks.goodput.__main__ import parse
from benchmarks.goodput.accounts import Phase, Stalls, Step, goodput, read
from tests.support.tiers import long

SECONDS = 240.0


def steps(
    *ended: float, first: int = 0, world: int = 2, redone: tuple[int, ...] = ()
) -> list[Step]:
    """Steps that end at these times; some of these attempts, by their positions, do not count."""
    found, number = [], first
    for position, end in enumerate(ended):
        counts = position not in redone
        found.append(Step(number, end - 1, end, counts, 0, world))
        number += counts
    return found


def test_a_step_is_committed_when_its_slowest_rank_has_done_so() -> None:
    phase = Phase.of([steps(1.0, 2.0, 3.0), steps(1.5, 2.0, 4.0)], 0.0, 3.5)
    assert (phase.steps, phase.seconds) == (2, 3.5)
    assert (phase.p50, phase.p99, phase.mean) == (0.5, 0.5, 0.5)


def test_the_first_step_of_a_phase_begins_in_the_phase_before() -> None:
    phase = Phase.of([steps(1.0, 4.0, 5.0)], 1.0, 5.0)
    assert (phase.steps, phase.mean) == (2, 2.0)


def test_an_attempt_that_does_not_count_is_counted_once_for_the_group() -> None:
    logs = [steps(1.0, 2.0, 3.0, 4.0, redone=(1, 2)), steps(1.0, 2.0, 3.0, 4.0, redone=(1, 2))]
    phase = Phase.of(logs, 0.0, 4.0)
    assert (phase.steps, phase.redone) == (2, 2)


def test_goodput_is_the_time_of_the_steps_that_count_in_that_of_all() -> None:
    ideal = Phase.of([steps(1.0, 2.0, 3.0)], 0.0, 3.0)
    disturbed = Phase.of([steps(1.0, 2.0, 3.0, 5.0, redone=(2,))], 0.0, 5.0)
    assert goodput(ideal, disturbed) == pytest.approx(3 / 5)


def test_stalls_are_those_of_the_slowest_survivor_in_steps_beyond_one() -> None:
    one = steps(1.0, 2.0) + steps(4.0, 5.0, first=2, world=1) + steps(6.5, first=4)
    two = steps(1.0, 2.0) + steps(4.5, 5.0, first=2, world=1) + steps(6.0, first=4)
    newcomer = steps(6.5, first=4)
    stalls = Stalls.of([one, two, newcomer], 0.0, 1.0)
    assert (stalls.kills, stalls.joins) == ([1.5], [0.5])


def test_the_log_of_a_rank_that_was_killed_is_read_without_its_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    whole = steps(1.25, 2.5)
    file.write_text("".join(step.pack() + "\n" for step in whole) + "2.0 3.")
    assert read(file) == whole
    assert read(tmp_path / "none") == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kill", [long("rank"), "agent"])
def test_a_training_goes_on_through_a_kill_and_no_value_is_wrong(tmp_path: Path, kill: str) -> None:
    file = tmp_path / "results.json"
    lengths = ["--undisturbed", "0.5", "--seconds", "1", "--every", "1", "--step-ms", "10"]
    options = [*lengths, "--nodes", "3", "--kib", "16", "--kill", kill, "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.goodput", *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    for phase in ("undisturbed", "disturbed"):
        assert found[phase]["steps"] > 0
        assert found[phase]["wrong"] == 0
    # In a step in which a rank is lost, its samples are missing.
    assert found["disturbed"]["redone"] >= 1
    assert len(found["absent"]) == 1
    assert found["stalls"]["kills"]
    assert found["stalls"]["joins"]
    assert "goodput" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--nodes", "2"], ["--kib", "0"], ["--seconds", "5"], ["--undisturbed", "0"]]
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "expected" in capsys.readouterr().err
