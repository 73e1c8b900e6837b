"""Ranks join an elastic group of which the orchestrator has forgotten everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import elastic_programs as programs
from tests.support.processes.fixtures import pool_of_ranks, services_with
from tests.support.processes.ranks import Call, Job, RankPool, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"on_loss": "shrink", "timeout": 30.0}

services = services_with("node0", "node1", "node2")
pool = pool_of_ranks()


@pytest.fixture
def job(pool: RankPool) -> Iterator[Job]:
    with pool.unregistered((0, 1, 1, 2)) as job:
        yield job


@pytest.fixture(autouse=True)
def embedded(services: Services) -> None:
    """The orchestrator with its state in its own memory."""
    if services.redis_url != "embedded":
        services.kill_orchestrator()
        services.redis_url = "embedded"
        services.start_orchestrator()
        services.await_all_registered()


def join(job: Job, services: Services, rank: int, **options: Any) -> Call:
    return job.ranks[rank].start(
        programs.join,
        name=job.name,
        agent=services.socket_of(job.nodes[rank]),
        **{**OPTIONS, **options},
    )


def open_with(job: Job, services: Services, *ranks: int, **options: Any) -> None:
    results([join(job, services, rank, world_size=len(ranks), **options) for rank in ranks])


def open_and_join(job: Job, services: Services) -> None:
    """Rank 3, on a node of its own, joins a group that ranks 0 and 1 have opened."""
    open_with(job, services, 0, 1)
    assert join(job, services, 3).result()[:2] == [2, 3]
    reduces(job, 0, 1, 3)


def forget(services: Services, job: Job) -> None:
    """Have the orchestrator lose its state, and wait until agents have told it of the group."""
    services.kill_orchestrator()
    services.start_orchestrator()
    services.await_all_registered()
    groups = f"{services.orchestrator_url}/v1/groups"

    def is_known() -> bool:
        return any(
            each["group"] == job.name and each["term"] for each in services.get(groups)["groups"]
        )

    wait_until(is_known, "the orchestrator knows the group")


def reduces(job: Job, *ranks: int) -> None:
    calls = [job.start(rank, programs.reduce_once) for rank in ranks]
    assert results(calls) == [[float(len(ranks)), len(ranks)]] * len(ranks)


def test_ranks_and_nodes_join_a_group_that_the_orchestrator_has_forgotten(
    job: Job, services: Services
) -> None:
    open_with(job, services, 0, 1)
    forget(services, job)
    assert join(job, services, 2).result()[:2] == [2, 3]
    reduces(job, 0, 1, 2)
    assert join(job, services, 3).result()[:2] == [3, 4]
    reduces(job, 0, 1, 2, 3)


@pytest.mark.long
def test_the_ranks_that_have_joined_before_are_remembered_by_their_agents(
    job: Job, services: Services
) -> None:
    """The first ones leave: the group goes on, and takes in others, with those who have joined."""
    open_and_join(job, services)
    forget(services, job)
    for rank in (0, 1):
        job.start(rank, programs.leave).result()
    wait_until(
        lambda: services.group_status("node2", job.name)["world_size"] == 1, "they have left"
    )
    assert join(job, services, 2).result()[:2] == [1, 2]
    reduces(job, 2, 3)


@pytest.mark.long
def test_a_seat_that_was_free_before_the_loss_is_free_after_it(
    job: Job, services: Services
) -> None:
    open_with(job, services, 0, 1, max_world=2)
    job.start(1, programs.leave).result()
    wait_until(lambda: services.group_status("node0", job.name)["world_size"] == 1, "it has left")
    forget(services, job)
    assert join(job, services, 3, max_world=2).result()[:2] == [1, 2]
    reduces(job, 0, 3)


@pytest.mark.long
def test_a_node_with_ranks_that_have_joined_outlives_the_loss_of_another(
    job: Job, services: Services
) -> None:
    open_and_join(job, services)
    forget(services, job)
    services.kill_agent("node1")
    reduces(job, 0, 3)
    services.restart_dead_agents()
    job.ranks[1].kill()
