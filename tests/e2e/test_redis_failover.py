"""A Redis that Sentinels watch loses its master: jobs run on, and the replica takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance import programs
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import RankPool
from tests.support.processes.sentinels import WatchedRedis
from tests.support.processes.services import Services
from tests.support.require import requires

pytestmark = [pytest.mark.slow, pytest.mark.redis]

NODES = (0, 0, 1)
OP_SECONDS = 15.0
JOIN_SECONDS = 60.0

services = services_with("node0", "node1")
pool = pool_of_ranks()


@pytest.fixture
def redis(services: Services, tmp_path: Path) -> Iterator[WatchedRedis]:
    requires("redis")
    with WatchedRedis(tmp_path) as watched:
        services.kill_orchestrator()
        services.redis_url = watched.url
        services.start_orchestrator()
        services.await_all_registered()
        yield watched


def group_of(services: Services, name: str) -> dict[str, Any]:
    answer = httpx.get(
        f"{services.orchestrator_url}/v1/groups/{name}",
        headers={"Authorization": f"Bearer {services.token}"},
    )
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


@pytest.mark.long
def test_a_running_group_and_one_that_opens_outlive_the_redis_master(
    redis: WatchedRedis, services: Services, pool: RankPool
) -> None:
    with pool.job(NODES, "survivor", timeout=OP_SECONDS) as job:
        before = group_of(services, "survivor")
        stream = job.start_all(programs.stream, numel=100_000, seconds=6.0)
        with pool.unregistered(NODES) as late:
            redis.master.stop()
            opening = late.start_entering(services, init_timeout=JOIN_SECONDS)
            redis.await_failover()
            for call in opening:
                call.result()
        assert min(call.result() for call in stream) > 0, "every op had its result"
        services.await_all_registered()
        assert group_of(services, "survivor") == before, "the replica had the group"
    with pool.job(NODES, "survivor", timeout=OP_SECONDS) as job:
        job.run(programs.calls, count=10)
