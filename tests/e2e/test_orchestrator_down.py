"""The orchestrator, or its Redis, goes away: running jobs do not notice, and it can come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_core.errors import MultipleRegister, OrchestratorUnreachable, ServiceError
from tests.conformance import programs
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import Job, RankPool, failures
from tests.support.processes.services import Services
from tests.support.require import requires
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NODES = (0, 0, 1)
HUNDREDS = 300
OP_SECONDS = 15.0

services = services_with("node0", "node1")
pool = pool_of_ranks()


@pytest.fixture
def embedded(services: Services) -> None:
    """The orchestrator with its state in its own memory."""
    with_store(services, "embedded")


@pytest.fixture
def redis(services: Services, tmp_path: Path) -> Iterator[RedisServer]:
    """The orchestrator with its state in a Redis of its own."""
    requires("redis")
    server = RedisServer(tmp_path)
    server.start()
    with_store(services, server.url)
    yield server
    server.stop()


def with_store(services: Services, redis_url: str) -> None:
    if services.redis_url != redis_url or services.orchestrator_ended:
        services.kill_orchestrator()
        services.redis_url = redis_url
        services.start_orchestrator()
        services.await_all_registered()


def job_of(pool: RankPool, name: str | None = None) -> AbstractContextManager[Job]:
    return pool.job(NODES, name, timeout=OP_SECONDS)


def goes_on(job: Job) -> None:
    """Hundreds of ops without a single failure."""
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.calls, count=HUNDREDS) == [[total] * 4] * job.world_size


def a_new_job_starts(pool: RankPool, *names: str) -> None:
    for name in names:
        with job_of(pool, name) as job:
            goes_on(job)


@pytest.mark.usefixtures("embedded")
def test_a_running_job_does_not_notice_that_the_orchestrator_is_killed(
    pool: RankPool, services: Services
) -> None:
    with job_of(pool, "survivor") as job:
        goes_on(job)
        stream = job.start_all(programs.stream, numel=100_000, seconds=1.0)
        services.kill_orchestrator()
        assert min(call.result() for call in stream) > 0
        goes_on(job)
        services.start_orchestrator()
        services.await_all_registered()
        goes_on(job)
        opening = job.opening
    with job_of(pool, "survivor") as job:
        goes_on(job)
        assert job.opening > opening, "an orchestrator without memory uses no number twice"
    a_new_job_starts(pool, "another")


@pytest.mark.usefixtures("embedded")
def test_a_second_job_under_one_name_hears_so_at_once_from_an_orchestrator_that_forgot_the_first(
    pool: RankPool, services: Services
) -> None:
    with job_of(pool, "taken") as job, pool.unregistered(NODES, "taken") as other:
        services.kill_orchestrator()
        services.start_orchestrator()
        services.await_all_registered()
        for failure in failures(other.start_entering(services, init_timeout=60.0)):
            assert type(failure.error) is MultipleRegister
            assert "the group runs, with 3 ranks on nodes node0, node1" in failure.error.message
        goes_on(job)


@pytest.mark.usefixtures("embedded")
def test_ranks_may_leave_while_the_orchestrator_is_down(pool: RankPool, services: Services) -> None:
    with job_of(pool, "leaver") as job:
        services.kill_orchestrator()
        goes_on(job)
    services.start_orchestrator()
    services.await_all_registered()
    a_new_job_starts(pool, "leaver", "another")


@pytest.mark.usefixtures("embedded")
def test_who_registers_while_the_orchestrator_is_down_is_told_in_time(
    pool: RankPool, services: Services
) -> None:
    services.kill_orchestrator()
    with pool.unregistered(NODES) as job:
        found = failures(job.start_entering(services, init_timeout=1.5))
        for failure in found:
            assert isinstance(failure.error, ServiceError)
            assert failure.seconds < 1.5 + 4.0
        assert isinstance(found[0].error, OrchestratorUnreachable)
        assert services.orchestrator_url in found[0].error.message
        services.start_orchestrator()
        services.await_all_registered()
        job.enter(services, timeout=OP_SECONDS)
        goes_on(job)


@pytest.mark.long
@pytest.mark.usefixtures("embedded")
def test_who_registers_while_the_orchestrator_is_away_is_seated_when_it_is_back(
    pool: RankPool, services: Services
) -> None:
    services.kill_orchestrator()
    with pool.unregistered(NODES) as job:
        calls = job.start_entering(services, timeout=OP_SECONDS, init_timeout=30.0)
        services.start_orchestrator()
        job.entered(calls)
        goes_on(job)


@pytest.mark.redis
def test_a_running_job_does_not_notice_that_redis_is_gone(
    pool: RankPool, services: Services, redis: RedisServer
) -> None:
    """Its memory is gone too when it is back, as with any cache."""
    with job_of(pool, "keeper") as job:
        redis.stop()
        goes_on(job)
        services.kill_orchestrator()
        goes_on(job)
        redis.start()
        services.start_orchestrator()
        services.await_all_registered()
        goes_on(job)
    a_new_job_starts(pool, "keeper", "another")


@pytest.mark.redis
def test_an_orchestrator_that_is_killed_remembers_the_groups_in_redis(
    pool: RankPool, services: Services, redis: RedisServer
) -> None:
    """Ranks that leave meanwhile give their seats back as soon as it can be told."""
    with job_of(pool, "reader") as job:
        goes_on(job)
        services.kill_orchestrator()
        services.start_orchestrator()
        services.await_all_registered()
        listed = services.get(f"{services.orchestrator_url}/v1/groups/reader")
        assert [place["rank"] for place in listed["present"]] == [0, 1, 2]
        goes_on(job)
        services.kill_orchestrator()
    services.start_orchestrator()
    services.await_all_registered()
    a_new_job_starts(pool, "reader", "another")


@pytest.mark.long
@pytest.mark.redis
def test_a_group_that_is_forming_survives_a_restart_of_the_orchestrator(
    pool: RankPool, services: Services, redis: RedisServer
) -> None:
    with pool.unregistered(NODES) as job:
        early = job.start_entering(services, [0, 1], timeout=OP_SECONDS)
        wait_until(lambda: services.seated(job.name) == 2, "two ranks have their seats")
        services.kill_orchestrator()
        services.start_orchestrator()
        services.await_all_registered()
        late = job.start_entering(services, [2], timeout=OP_SECONDS)
        job.entered([*early, *late])
        goes_on(job)
