"""The parts about thousands of nodes, with few: every request is granted, every phase told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allfold_core.schedules.registry import STRATEGIES
from allfold_core.schedules.strategies import direct
from benchmarks.errors import BenchmarkFailed
from benchmarks.scale.beats import BEATS
from benchmarks.scale.cluster import ImaginaryCluster
from benchmarks.scale.http_load import Answer, Load
from benchmarks.scale.orchestrator import measure
from benchmarks.scale.predictions import MAX_SIMULATED_STEPS, about_steps
from tests.support.require import requires

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
NODES, RANKS = 5, 2


@pytest.mark.long
@pytest.mark.slow
def test_the_membership_of_a_cluster_is_measured_and_predictions_are_drawn(tmp_path: Path) -> None:
    file, plots = tmp_path / "results.json", tmp_path / "plots"
    options = ["--nodes", str(NODES), "--ranks-per-node", str(RANKS), "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks", "--parts", "membership,predictions", *options]
    done = subprocess.run(
        [*command, "--plots", str(plots)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "fastest all-reduce" in done.stdout
    assert {each.name for each in plots.iterdir()} == {
        "scale-all-reduce-1.svg",
        "scale-all-reduce-2.svg",
    }
    report = json.loads(file.read_text())
    assert report["environment"]["cores"] > 0
    found = report["scale"]["membership"]
    assert (found["nodes"], found["ranks_per_node"]) == (NODES, RANKS)
    assert found["plan_seconds"] > 0
    assert 0 < found["compressed_bytes"] < found["plan_bytes"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_phase_of_a_cluster_has_all_its_requests(replicas: int) -> None:
    requires("redis")
    found = measure(ImaginaryCluster(NODES, RANKS), replicas, connections=4)
    ranks = NODES * RANKS
    assert {name: phase["requests"] for name, phase in found["phases"].items()} == {
        "register": NODES,
        "join": ranks - 1,
        "plan": NODES,
        "beats": (NODES - 1) * BEATS,
        "view": 1,
        "node_lost": 1,
        "again_join": ranks - RANKS - 1,
        "again_plan": NODES - 1,
        "leave": ranks - RANKS,
    }
    for phase in found["phases"].values():
        assert 0 < phase["median_seconds"] <= phase["p99_seconds"]
    assert found["orchestrator_peak_bytes"] > found["redis_peak_bytes"] > 0


def test_without_a_redis_server_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(BenchmarkFailed, match="needs a redis-server on the PATH"):
        measure(ImaginaryCluster(NODES, RANKS), replicas=1, connections=1)


def test_times_are_those_of_the_requests_or_since_a_moment() -> None:
    load = Load(1.0, [Answer(200, 10, 1.0, 3.0), Answer(200, 20, 2.0, 5.0)])
    assert load.times() == [2.0, 3.0]
    assert load.times(since=0.0) == [3.0, 5.0]
    assert (load.finished, load.nbytes, load.statuses) == (5.0, 30, {200: 2})


def test_a_new_strategy_with_many_messages_is_not_simulated_with_many_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRATEGIES, "mesh", replace(direct.STRATEGY, name="mesh"))
    assert about_steps("mesh", 64) < MAX_SIMULATED_STEPS < about_steps("mesh", 1000)
    assert about_steps("double_tree", 1000) < MAX_SIMULATED_STEPS < about_steps("ring", 256)
