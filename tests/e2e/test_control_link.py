"""Agents find their way back to the orchestrator: after a pause too long, and to other replicas."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_core.errors import PeerLost
from tests.conformance import programs
from tests.support.processes.ranks import Job, RankPool, failures
from tests.support.processes.services import Services
from tests.support.require import requires
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.redis]

AGENTS = ("node0", "node1")
OP_SECONDS = 3.0
SECONDS = 30.0


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Services]]:
    """Two replicas of the orchestrator, and two agents that know both."""
    requires("redis")
    redis = RedisServer(tmp_path)
    redis.start()
    with Services(redis_url=redis.url) as one, Services(redis.url, token=one.token) as two:
        one.start_orchestrator()
        two.start_orchestrator()
        for name in AGENTS:
            one.launch_agent(name, f"{one.orchestrator_url},{two.orchestrator_url}")
        for name in AGENTS:
            one.await_agent(name)
        yield [one, two]
    redis.stop()


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


def states(services: Services) -> dict[str, str]:
    nodes = services.get(f"{services.orchestrator_url}/v1/nodes")["nodes"]
    return {node["node"]: node["state"] for node in nodes}


@pytest.mark.long
def test_an_agent_that_was_taken_for_lost_serves_new_ranks_without_a_restart(
    replicas: list[Services],
) -> None:
    one, _ = replicas
    with RankPool(one) as pool:
        with pool.job([0, 1], timeout=OP_SECONDS) as job:
            works(job)
            os.kill(one.agents["node1"].pid, signal.SIGSTOP)
            try:
                wait_until(lambda: states(one)["node1"] == "gone", "it is taken for lost", SECONDS)
            finally:
                os.kill(one.agents["node1"].pid, signal.SIGCONT)
            wait_until(lambda: states(one)["node1"] == "alive", "it has registered", SECONDS)
            for failure in failures(job.start_all(programs.call)):
                assert isinstance(failure.error, PeerLost)
        with pool.job([0, 1], timeout=OP_SECONDS) as again:
            works(again)
    assert "registers again as a new incarnation" in (one.folder / "node1.log").read_text()


def test_a_replica_that_freezes_costs_no_job_anything_and_new_ones_start_at_the_other(
    replicas: list[Services],
) -> None:
    one, two = replicas
    assert one.orchestrator is not None
    with RankPool(one) as pool, pool.job([0, 1], timeout=OP_SECONDS) as job:
        works(job)
        one.orchestrator.signal(signal.SIGSTOP)
        try:
            with pool.job([1, 0], timeout=OP_SECONDS) as another:
                works(another)
            works(job)
        finally:
            one.orchestrator.signal(signal.SIGCONT)
        wait_until(lambda: set(states(one).values()) == {"alive"}, "it is back", SECONDS)
        works(job)
        assert two.seated(job.name) == job.world_size
