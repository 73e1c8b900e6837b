"""A node falls silent while the orchestrator is down: nobody can say if the others go on alone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from allfold_cluster.redis_server import RedisServer
from tests.conformance import programs, survival_programs
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import RankPool, results
from tests.support.processes.services import Services
from tests.support.require import requires

pytestmark = pytest.mark.slow

TIMEOUT = 1.0
OP_SECONDS = 15.0

services = services_with("node0", "node1")
pool = pool_of_ranks()


@pytest.fixture
def redis(services: Services, tmp_path: Path) -> Iterator[None]:
    """A store that lives on while the orchestrator is down."""
    requires("redis")
    server = RedisServer(tmp_path)
    server.start()
    services.kill_orchestrator()
    services.redis_url = server.url
    services.start_orchestrator()
    services.await_all_registered()
    yield
    server.stop()


def test_an_op_that_nobody_can_decide_is_left_open_and_has_its_result_later(
    pool: RankPool, services: Services
) -> None:
    """For a rank that waits in its call, and for one that has a handle."""
    with pool.job((0, 0, 1), timeout=OP_SECONDS) as job:
        assert job.run(programs.call) == [[6.0] * 4] * 3
        services.kill_orchestrator()
        silent = services.agents["node1"].child
        silent.signal(signal.SIGSTOP)
        try:
            leaving = [
                job.start(rank, survival_programs.leave_open, timeout=TIMEOUT, async_op=async_op)
                for rank, async_op in enumerate([False, True])
            ]
            for decided, message in results(leaving):
                assert not decided
                assert "waits for node node1, which is silent" in message
                assert "the orchestrator cannot be asked" in message
        finally:
            silent.signal(signal.SIGCONT)
        waiting = [job.start(rank, survival_programs.outcome_of_open) for rank in (0, 1)]
        assert job.start(2, programs.call, dtype="float64", shape=(3,)).result() == [6.0] * 3
        assert results(waiting) == [[6.0] * 3] * 2
        services.start_orchestrator()
        services.await_all_registered()
        assert job.run(programs.call) == [[6.0] * 4] * 3


@pytest.mark.long
@pytest.mark.usefixtures("redis")
def test_an_op_that_was_left_open_is_redone_when_the_orchestrator_is_back(
    pool: RankPool, services: Services
) -> None:
    with pool.job((0, 1), timeout=OP_SECONDS, on_loss="shrink") as job:
        assert job.run(programs.call) == [[3.0] * 4] * 2
        services.kill_orchestrator()
        services.kill_agent("node1")
        leaving = job.start(0, survival_programs.leave_open, timeout=TIMEOUT, async_op=False)
        decided, message = leaving.result()
        assert not decided
        assert "waits for node node1, which refuses connections" in message
        services.start_orchestrator()
        assert job.start(0, survival_programs.outcome_of_open).result() == [1.0] * 3
        assert job.start(0, survival_programs.described).result() == [0, 1, 1, 1]
