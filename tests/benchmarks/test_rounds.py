"""The benchmark of rounds: its options, what it makes of reports, and a short run of each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allfold_cluster.network import Network, why_not
from benchmarks.goodput.accounts import Step
from benchmarks.rounds import slow
from benchmarks.rounds.kills import different, seconds_lost
from benchmarks.rounds.kills_rank import Outcome, mean, outcomes_of, read_outcomes
from benchmarks.rounds.nodes import Told
from benchmarks.rounds.options import WORLD, parse
from benchmarks.rounds.peers import figures
from benchmarks.rounds.share import CASES, row
from benchmarks.rounds.training_rank import Orders
from benchmarks.rounds.volume import tensor_bytes
from tests.benchmarks.commands import run_benchmark

SECONDS = 250.0
SMALL = ["--numel", "16384", "--seconds", "2", "--step-ms", "5"]


def run(tmp_path: Path, *options: str) -> Any:
    file = tmp_path / "rounds.json"
    _, rows = run_benchmark("benchmarks.rounds", *options, json_file=file, timeout=SECONDS)
    return rows


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--parts", "all"], "expected names of share"),
        (["--cases", "int8"], "expected names of int4"),
        (["--numel", "1000"], "expected a multiple of 16384"),
        (["--seconds", "0"], "expected times above 0"),
        (["--faults", "0"], "at least 1, 1 fault"),
        (["--fragments", "9"], "expected 1 to 8 fragments"),
        (["--delay", "-1"], "expected a delay of 0"),
        (["--far", "1parsec"], "is not a network"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert problem in capsys.readouterr().err


def test_the_whole_is_measured_by_default_at_the_size_of_the_published_sweep() -> None:
    found = parse([])
    assert found.parts == ("share", "bytes", "slow", "kills", "peers")
    assert abs(found.numel / 30.8e6 - 1) < 1e-3
    assert found.step == 0.043
    assert parse(["--far", "none"]).far == []


def test_of_the_tensor_all_nodes_send_six_times_its_size_on_the_wire() -> None:
    assert tensor_bytes("bfloat16", 16384) == 6 * 16384 * 2
    assert tensor_bytes("int4", 16384) == 6 * (16384 // 2 + 128 * 2)
    assert tensor_bytes("topk", 16384) == 6 * 4 * 118


def test_the_share_is_that_of_the_rank_that_has_computed_least() -> None:
    orders = Orders(1, 0.5, 4, 4, 1, "int4", "round", 10.0)
    reports = [
        {"steps": steps, "elapsed": 10.0, "took": [2.0], "hidden": [1.0], "sent": [7], "digest": d}
        for steps, d in ((20, "a"), (10, "b"), (20, "a"))
    ]
    found = row(CASES[0], Network.parse("50mbit"), orders, Told(reports, [9, 9, 9]))
    assert found["share computing"] == "0.500"
    assert (found["hidden"], found["round p50 s"], found["different"]) == ("0.50", "2.000", 1)


def test_rounds_with_the_slow_rank_are_those_in_which_its_weight_counts() -> None:
    weights = [[1.0, 1.0, 1.0, float(number % 4 == 1)] for number in range(8)]
    report = {"ended": list(range(8)), "weights": weights, "took_part": [True] * 8}
    other = {**report, "weights": [*weights[:7], [1.0] * 4]}
    found = slow.figures([report, report, other, {**report, "weights": weights[:5]}])
    assert (found["rounds"], found["rounds with rank 3"], found["one in"]) == (8, "1 5", "4.00")
    assert (found["period mean ms"], found["different"], found["others left out"]) == (1e3, 1, 0)


def log(*ended: float) -> list[Step]:
    return [Step(number, end - 1, end, True, 0, 4) for number, end in enumerate(ended)]


def test_the_time_lost_is_that_of_the_slowest_survivor_beyond_an_undisturbed_round() -> None:
    logs = [log(1, 2), log(1, 2, 4, 5), log(1, 2, 4.5, 5), log(4.5, 5)]
    files = [Path(name) for name in ("node0.0.steps", "node1.1.steps", "node2.2.steps", "node0.3")]
    assert seconds_lost(logs, files, at=2.5, node=0, ideal=1.0) == 1.5


def test_a_round_that_no_survivor_has_finished_lasts_until_the_logs_end() -> None:
    logs, files = [log(1, 9), log(1, 2)], [Path("node0.0.steps"), Path("node1.1.steps")]
    assert seconds_lost(logs, files, at=2.5, node=0, ideal=1.0) == 5.5


def test_a_round_is_different_if_ranks_have_seen_other_participants_or_bits() -> None:
    one = [Outcome(number, 1, (1.0, 2.0), "a") for number in range(3)]
    two = [one[0], Outcome(1, 1, (1.0, 0.0), "a"), Outcome(2, 1, (1.0, 2.0), "b")]
    assert (different([one, one]), different([one, two])) == (0, 2)


def test_means_of_any_ranks_are_whole_numbers() -> None:
    pattern = np.arange(1, 5, dtype=np.float32)
    for weights in ((1, 2, 3, 4), (1, 3, 4), (2, 0, 3), (4,)):
        found = mean(pattern, weights, 5)
        assert np.array_equal(found, np.rint(found))
        assert np.array_equal(found.astype(np.float32).astype(np.float64), found)


def test_a_line_that_was_cut_off_is_no_outcome(tmp_path: Path) -> None:
    file = outcomes_of(tmp_path / "node0.0.steps")
    assert read_outcomes(file) == []
    file.write_text('[0, 1, [1.0, 2.0], "a"]\n[1, 1, [1.')
    assert read_outcomes(file) == [Outcome(0, 1, (1.0, 2.0), "a")]


def test_computing_is_compared_with_training_that_sends_nothing() -> None:
    alone = Told([{"elapsed": 2.0}] * 2, [0, 0])
    told = Told([{"elapsed": each, "loss": 0.5, "total": 1.0} for each in (3.0, 4.0)], [8000, 0])
    again = Told([{**each, "loss": 0.7} for each in told.reports], [8000, 0])
    assert figures([told, again], [alone, alone], 4) == {
        "KB per step and node": "1.00",
        "share computing": "0.500",
        "test loss": "0.6000",
        "of each seed": "0.5000 0.7000",
        "same bits": "yes",
    }


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    step, *rounds = run(tmp_path, "--parts", "bytes", *SMALL)["bytes"]
    assert step["by agents' metric"] == step["bytes by formula"]
    for each in rounds:
        assert each["by results"] == each["by agents' metric"]
        # Each frame says its weight in 8 bytes, which the formula does not have: the nodes send the
        # whole tensor to one of them and back, or a part to each of the others and back.
        frames = (2 * (WORLD - 1), 2 * (WORLD - 1) * WORLD)
        assert each["by results"] - each["bytes by formula"] in [8 * number for number in frames]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_slow_rank_takes_part_now_and_then(tmp_path: Path) -> None:
    alike, slow_ = run(tmp_path, "--parts", "slow", "--seconds", "4")["slow"]
    assert alike["different"] == slow_["different"] == 0
    assert slow_["rounds with rank 3"]
    assert float(slow_["pace"]) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_after_kills_everybody_has_the_same_and_right_rounds(tmp_path: Path) -> None:
    (found,) = run(tmp_path, "--parts", "kills", "--faults", "5")["kills"]
    assert [found[name] for name in ("faults", "wrong", "different", "hangs, failures")] == [
        *(5, 0, 0, 0)
    ]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_lines_and_peers_are_measured(tmp_path: Path) -> None:
    if reason := why_not([Network.parse("1ms")]):
        pytest.skip(reason)
    options = ["--parts", "share,peers", *SMALL, "--far", "1ms+1%", "--steps", "32", "--scale", "2"]
    found = run(tmp_path, *options)
    shares = found["share"]
    lines = ["25mbit", "25mbit", "100mbit", "100mbit", "25mbit+1ms+1%", "100mbit+1ms+1%"]
    assert [each["line"] for each in shares] == lines
    assert all(0 < float(each["share computing"]) <= 1 for each in shares)
    assert not any(each["different"] for each in shares)
    peers = {each["what"]: each for each in found["peers"]}
    assert peers["no communication"]["KB per step and node"] == "0.00"
    assert peers["rounds of int4"]["same bits"] == "yes"
    assert "EXO Gym, DiLoCo: not installed" in peers
