"""The benchmark of the diagnosis: its score, and a short run with real faults."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster.network import Network, why_not
from benchmarks.children import ROOT, environment, python
from benchmarks.diagnosis.faults import FAULTS
from benchmarks.diagnosis.scoring import NOTHING, Expected, Score, Trial
from tests.support.require import requires
from tests.support.waiting import wait_until

Json = dict[str, Any]
SECONDS = 100.0
RANK_3 = {"kind": "rank", "node": "b", "rank": 3, "to": ""}
RANK_1 = {"kind": "rank", "node": "a", "rank": 1, "to": ""}
LATE = Expected("late_rank", False, [RANK_3], ["hang"])


def report(culprit: Json = RANK_3, cause: str = "late_rank", effect: str = "hang") -> Json:
    return {"culprit": culprit, "cause": cause, "effect": effect, "communication": False}


def trial(*reports: Json, delay: float | None = 1.0, fault: str = "late rank") -> Trial:
    return Trial(fault, LATE, reports, delay)


def test_a_trial_is_right_if_class_and_culprit_are_whatever_the_cause_is_called() -> None:
    assert trial(report()).is_found
    assert trial(report(cause="locked_rank")).is_found
    assert not trial(report(RANK_1)).is_found
    assert not trial(report(effect="slow")).is_found
    assert not trial().is_found


def test_precision_counts_reports_and_recall_counts_faults() -> None:
    score = Score([trial(report(), report(RANK_1)), trial(delay=None), trial(report(), delay=2.5)])
    assert score.recall == pytest.approx(2 / 3)
    assert score.precision == pytest.approx(2 / 3)
    assert score.within(2.0) == pytest.approx(1 / 3)


def test_the_matrix_has_what_was_said_first_and_marks_wrong_culprits() -> None:
    score = Score([trial(report()), trial(report(RANK_1), report()), trial(delay=None)])
    columns, rows = score.matrix()
    assert columns == ["late_rank", "late_rank?", NOTHING]
    assert rows == {"late rank": {"late_rank": 1, "late_rank?": 1, NOTHING: 1}}


def test_delays_are_those_of_a_kind_of_fault() -> None:
    score = Score([trial(report(), delay=each) for each in (1.0, 2.0, 6.0)])
    assert score.delays("late rank") == (2.0, 6.0, 3.0)
    assert score.delays("dead agent") is None


def test_an_empty_score_is_no_perfect_one() -> None:
    assert (Score().recall, Score().precision, Score().within(2.0)) == (0.0, 0.0, 0.0)


@pytest.mark.long
def test_a_short_run_names_the_culprits_of_real_faults(tmp_path: Path) -> None:
    requires("redis")
    if reason := why_not([Network.parse("2gbit")]):
        pytest.skip(reason)
    file = tmp_path / "diagnosis.json"
    kinds = ["stopped rank", "lock held", "wrong type", "killed rank"]
    command = python(
        "benchmarks.diagnosis", "--faults", "4", "--kinds", ",".join(kinds), "--json", str(file)
    )
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(file.read_text())["trials"]
    assert {each["fault"] for each in trials} == set(kinds) <= FAULTS.keys()
    for each in trials:
        culprits = [said["culprit"] for said in each["reports"]]
        assert each["expected"]["culprits"][0] in culprits, done.stdout
    assert "4 faults of 4 kinds" in done.stdout


@pytest.mark.long
def test_a_short_run_without_faults_raises_no_alarm() -> None:
    requires("redis")
    if reason := why_not([Network.parse("2gbit")]):
        pytest.skip(reason)
    command = python("benchmarks.diagnosis", "--faults", "0", "--healthy", "8", "--burners", "2")
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 false alarms in 8 s" in done.stdout


@pytest.mark.long
def test_the_cost_is_measured_on_one_node_and_between_two(tmp_path: Path) -> None:
    requires("redis")
    if reason := why_not([Network.parse("2gbit")]):
        pytest.skip(reason)
    file = tmp_path / "cost.json"
    command = python("benchmarks.diagnosis", "--faults", "0", "--cost", "1", "--json", str(file))
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    costs = json.loads(file.read_text())["cost"]
    measured = {(each["shape"], each["size"]) for each in costs}
    assert measured == {("1x2", "4 KiB"), ("1x2", "1 MiB"), ("2x1", "4 KiB"), ("2x1", "1 MiB")}
    for each in costs:
        p50, p99, _ = each["on"]
        assert 0 < p50 <= p99
        assert len(each["costs"]) == 1


def test_a_run_that_is_told_to_end_leaves_no_namespace() -> None:
    requires("redis")
    if reason := why_not([Network.parse("2gbit")]):
        pytest.skip(reason)
    command = python("benchmarks.diagnosis", "--faults", "4", "--kinds", "late rank")
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as run:

        def namespaces() -> list[Path]:
            return list(Path("/run/netns").glob(f"allfold-net-{run.pid}-*"))

        try:
            wait_until(namespaces, "the namespaces of the run")
        finally:
            run.terminate()
            assert run.wait(SECONDS) == 128 + signal.SIGTERM
    assert namespaces() == []
