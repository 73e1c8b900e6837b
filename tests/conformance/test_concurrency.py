"""Many ops, groups and threads at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import group_programs, programs
from tests.conformance.conftest import OP_SECONDS
from tests.support.processes.ranks import Job, RankPool, results


@pytest.fixture
def other(job: Job, pool: RankPool) -> Iterator[Job]:
    """A second group of the same processes, numbered the other way round."""
    second = Job(f"{job.name}-other", job.ranks[::-1], job.nodes[::-1])
    second.enter(pool.services)
    yield second
    second.leave()


@pytest.mark.parametrize("seed", range(2))
def test_three_hundred_ops_in_flight_are_waited_for_in_any_order(job: Job, seed: int) -> None:
    assert job.run(programs.many_in_flight, count=300, seed=seed) == [0] * job.world_size


def test_ops_of_two_groups_are_called_in_another_order_on_other_ranks(job: Job, other: Job) -> None:
    job.run(programs.interleaved, other=other.name, count=60)


def test_two_groups_work_in_threads_of_the_same_processes(job: Job, other: Job) -> None:
    done = job.run(programs.in_threads, other=other.name, count=60)
    assert done == [120] * job.world_size


def test_the_ops_of_one_group_are_waited_for_in_two_threads(job: Job) -> None:
    done = job.run(programs.one_op_in_two_threads, count=80)
    assert done == [80] * job.world_size


def test_threads_open_groups_in_another_order_on_every_rank(job: Job) -> None:
    names = [f"{job.name}-{letter}" for letter in "ab"]
    calls = [
        job.start(
            rank,
            group_programs.open_two_in_threads,
            names=names if rank % 2 else names[::-1],
            timeout=OP_SECONDS,
        )
        for rank in range(job.world_size)
    ]
    total = sum(range(job.world_size))
    assert results(calls) == [[total] * 2] * job.world_size


def test_a_group_is_opened_while_a_thread_waits_to_leave_another(job: Job) -> None:
    got = job.run(group_programs.leave_and_open_in_threads, name=job.name, timeout=OP_SECONDS)
    assert got == [[sum(range(job.world_size))] * 2] * job.world_size


def test_barriers_and_ops_alternate_by_the_hundred(job: Job) -> None:
    for kind in ("barrier", "all_reduce", "barrier"):
        job.run(programs.calls, count=100, kind=kind)
