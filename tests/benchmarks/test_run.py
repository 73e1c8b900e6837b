"""The benchmark suite for real, on two ranks: every library does every collective right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.devices import gpus
from benchmarks.plan import KINDS, MODELS
from benchmarks.requirements import is_installed
from tests.support.processes.cli import Commands, commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 300.0  # they take a tenth of that, but for a machine that does much else


@pytest.fixture
def allfold() -> Iterator[Commands]:
    with commands() as started:
        yield started


@pytest.fixture
def interrupts_ignored() -> Iterator[None]:
    """SIGINT as ``nohup`` and ``make -j`` leave it to the tests."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_no_library_is_wrong_in_any_collective(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--shapes", "1x2", "--kinds", "all", "--sizes", "4K", "--computing", "0"]
    options += ["--seconds", "0", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())["results"]
    assert [result["kind"] for result in found] == list(KINDS)
    for result in found:
        libraries = ["allfold", "plain", "allfold-torch", "gloo", "mpich", "openmpi"]
        libraries = [name for name in libraries if is_installed(name)]
        if result["kind"] == "barrier":
            libraries.remove("plain")
        some_kinds_alone = {"deepspeed", "ucx"}
        assert [name for name in result["libraries"] if name not in some_kinds_alone] == libraries
        for figures in result["libraries"].values():
            assert figures["wrong"] == 0
            assert figures["samples"] >= 5
            assert 0 < figures["least"] <= figures["median"] <= figures["p99"]
            assert figures["least"] <= figures["mean"]


@pytest.mark.long
def test_every_rank_decodes_the_tokens_of_a_single_process_with_every_library(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.json"
    options = ["--parts", "decode", "--shapes", "2x1", "--seconds", "0", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(file.read_text())["results"]
    assert {"allfold", "plain", "allfold-torch", "gloo", "mpich"} <= found["libraries"].keys()
    for figures in found["libraries"].values():
        assert figures["wrong"] == 0
        assert figures["tokens_per_second"] == pytest.approx(1 / figures["mean"])


@pytest.mark.long
def test_ops_and_training_steps_are_measured_in_both_ways(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--parts", "latency,ddp", "--shapes", "2x1", "--sizes", "4,4K", "--peers", "gloo"]
    options += ["--pin", "--ops", "40", "--seconds", "0", "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())["results"]
    assert [(each["size"], each["computing"]) for each in found if each["kind"] != "ddp"] == [
        *((4, 0.0), (4, 0.005), (4096, 0.0), (4096, 0.005)),
    ]
    steps = [each["size"] for each in found if each["kind"] == "ddp"]
    assert steps == [model.size for model in MODELS]
    assert all(each["network"] == "pinned" for each in found)
    assert all(each["wrong"] == 0 for result in found for each in result["libraries"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--load no-such-file.json", "No such file"),
        ("--device cuda", "finds no NVIDIA GPU"),
        ("--pin --shapes 99999x1", "99999 nodes with a core each"),
        ("--parts ddp --peers none --shapes 1x4", "nothing was measured: ddp needs the peer gloo"),
    ],
)
def test_what_cannot_be_done_is_told_without_a_traceback(options: str, message: str) -> None:
    if "cuda" in options and gpus():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks: ")
    assert message in done.stderr


@pytest.mark.long
def test_allfold_bench_shows_another_library_beside(allfold: Commands) -> None:
    sizes = ("--min-bytes", "4K", "--max-bytes", "4K")
    command = allfold.start("bench", "--against", "gloo", "--kind", "all_reduce", *sizes)
    assert command.wait(SECONDS) == 0, command.out + command.err
    rows = [line.split() for line in command.out.splitlines() if line[0] != "#"]
    assert [row[4] for row in rows] == ["library", *("allfold", "gloo") * 2]
    assert rows[0][5:8] == ["p50", "p99", "mean"]


def test_what_the_suite_does_not_have_is_refused(allfold: Commands) -> None:
    command = allfold.start("bench", "--against", "gloo", "--strategy", "ring")
    assert command.wait(SECONDS) == 2
    assert "--against cannot be combined with --strategy" in command.err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_was_told_to_end(
    allfold: Commands, number: signal.Signals, interrupts_ignored: None
) -> None:
    sizes = ("--min-bytes", "4", "--max-bytes", "16M", "--factor", "2")
    command = allfold.start("bench", "--against", "gloo,mpich", *sizes)
    command.wait_for_output(" gloo ", SECONDS)
    command.send(number)
    assert command.wait(SECONDS) == 128 + number
