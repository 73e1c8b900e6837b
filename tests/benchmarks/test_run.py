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
from benchmarks.plan import KINDS
from tests.support.processes.cli import Commands, commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECONDS = 100.0


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


def test_no_library_is_wrong_in_any_collective(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = ["--shapes", "1x2", "--kinds", "all", "--sizes", "4K", "--seconds", "0"]
    command = [sys.executable, "-m", "benchmarks", *options, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())["results"]
    assert [result["kind"] for result in found] == list(KINDS)
    for result in found:
        libraries = ["allfold", "gloo", "mpich"]
        if result["kind"] != "barrier":
            libraries.insert(1, "plain")
        assert list(result["libraries"]) == libraries
        for figures in result["libraries"].values():
            assert figures["wrong"] == 0
            assert figures["samples"] >= 5
            assert 0 < figures["least"] <= figures["median"] <= figures["p99"]
            assert figures["least"] <= figures["mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--load no-such-file.json", "No such file"),
        ("--device cuda", "finds no NVIDIA GPU"),
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


def test_allfold_bench_shows_another_library_beside(allfold: Commands) -> None:
    sizes = ("--min-bytes", "4K", "--max-bytes", "4K")
    command = allfold.start("bench", "--against", "gloo", "--kind", "all_reduce", *sizes)
    assert command.wait(SECONDS) == 0, command.out + command.err
    rows = [line.split() for line in command.out.splitlines() if line[0] != "#"]
    assert [row[3] for row in rows] == ["library", "allfold", "gloo"]
    assert rows[0][4:7] == ["p50", "mean", "p99"]


def test_what_the_suite_does_not_have_is_refused(allfold: Commands) -> None:
    command = allfold.start("bench", "--against", "gloo", "--strategy", "ring")
    assert command.wait(SECONDS) == 2
    assert "--against cannot be combined with --strategy" in command.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_run_that_was_told_to_end(
    allfold: Commands, number: signal.Signals, interrupts_ignored: None
) -> None:
    sizes = ("--min-bytes", "4", "--max-bytes", "16M", "--factor", "2")
    command = allfold.start("bench", "--against", "gloo,mpich", *sizes)
    command.wait_for_output(" gloo ", SECONDS)
    command.send(number)
    assert command.wait(SECONDS) == 128 + number
