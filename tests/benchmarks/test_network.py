"""Runs on networks of namespaces: they are as slow as they say, and nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster.network import Network, why_not
from tests.support.require import required
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMESPACES = Path("/run/netns")
SECONDS = 100.0


@pytest.fixture(autouse=True)
def _networks() -> None:
    """Docker needs what they need: where it must be here, these tests must run."""
    if reason := why_not([Network.parse("5ms")]):
        if "docker" in required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@contextmanager
def running(network: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is over afterwards, whatever the test found."""
    options = ["--network", network, "--shapes", "2x1", "--sizes", "4K", "--computing", "0", *more]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", *options], cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()  # so that it removes its namespaces
        process.wait(SECONDS)


def namespaces_of(pid: int) -> list[Path]:
    return list(NAMESPACES.glob(f"allfold-net-{pid}-*"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Runs a network and gives its result; checks that its namespaces are gone."""

    def result_on(network: str) -> dict[str, Any]:
        file = tmp_path / "results.json"
        options = ("--seconds", "0", "--json", str(file))
        process = started.enter_context(running(network, *options))
        assert process.wait(SECONDS) == 0
        assert namespaces_of(process.pid) == []
        (result,) = json.loads(file.read_text())["results"]
        assert isinstance(result, dict)
        return result

    with ExitStack() as started:
        yield result_on


@pytest.mark.long
def test_a_line_with_a_rate_carries_no_more_than_that(run: Any) -> None:
    result = run("100mbit")
    assert 0 < result["line"] < 100e6 / 8
    assert [each["wrong"] for each in result["libraries"].values()] == [0, 0]


@pytest.mark.long
def test_no_op_is_faster_than_a_delayed_line(run: Any) -> None:
    result = run("5ms")
    assert list(result["libraries"]) == ["allfold", "gloo"]
    assert min(each["least"] for each in result["libraries"].values()) >= 0.005
    assert [each["wrong"] for each in result["libraries"].values()] == [0, 0]


def test_namespaces_are_removed_when_the_run_is_told_to_end() -> None:
    with running("100mbit", "--seconds", "60") as process:
        wait_until(lambda: len(namespaces_of(process.pid)) == 3, "namespaces", SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
        assert namespaces_of(process.pid) == []


def test_without_root_a_network_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in str(why_not([]))
