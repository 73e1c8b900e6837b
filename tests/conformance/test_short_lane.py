"""The short lane on one node, where the ranks do short ops by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_core.errors import MismatchError, PeerLost
from tests.conformance import lane_programs, programs
from tests.conformance.conftest import OP_SECONDS
from tests.conformance.lane_status import assert_same_bits, await_lane
from tests.support.processes.ranks import Job, RankPool, await_called, failures, results
from tests.support.processes.services import Services

THREE = (0, 0, 0)


@pytest.fixture(scope="module")
def shared_job(pool: RankPool) -> Iterator[Job]:
    with pool.job(THREE, timeout=OP_SECONDS) as job:
        yield job


@pytest.fixture
def lane(job: Job, services: Services) -> Job:
    """A job whose lane is open."""
    await_lane(services, job)
    return job


def test_the_agent_takes_no_part_in_an_op(lane: Job, services: Services) -> None:
    assert lane.run(lane_programs.count_posted, count=50) == [50] * 3
    assert services.group_status("node0", lane.name)["in_flight"] == []


def test_short_and_long_ops_may_follow_each_other(lane: Job) -> None:
    assert lane.run(lane_programs.short_and_long, count=24) == [24] * 3
    assert lane.run(lane_programs.all_kinds, first=0, count=40, numel=100) == [40] * 3


def test_the_bits_do_not_depend_on_the_lane(lane: Job, services: Services) -> None:
    for numel in (1, 1000, 16_000):
        assert_same_bits(services, lane, numel)
    assert_same_bits(services, lane, 1000, "float16")


def test_more_async_ops_than_there_are_slots_are_right_and_the_lane_opens_again(
    lane: Job, services: Services
) -> None:
    for _ in range(3):
        assert lane.run(lane_programs.burst, count=60) == [60] * 3
    assert lane.run(programs.many_in_flight, count=80, seed=1) == [0] * 3
    await_lane(services, lane)


def test_a_call_that_differs_fails_on_all_ranks_and_the_lane_opens_again(
    lane: Job, services: Services
) -> None:
    calls = [lane.start(rank, programs.call, shape=[8 + rank // 2]) for rank in range(3)]
    errors = [failure.error for failure in failures(calls, OP_SECONDS / 2)]
    assert {type(error) for error in errors} == {MismatchError}
    await_lane(services, lane)


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
def test_ranks_that_wait_in_the_lane_for_one_that_is_killed_have_one_outcome(
    pool: RankPool, services: Services, on_loss: str
) -> None:
    with pool.job(THREE, timeout=OP_SECONDS, on_loss=on_loss) as job:
        await_lane(services, job)
        seq = job.start(0, programs.counted).result()
        calls = [job.start(rank, lane_programs.participants, numel=8) for rank in (0, 1)]
        for rank in (0, 1):
            await_called(services, job, seq, rank)
        job.ranks[2].kill()
        if on_loss == "shrink":
            assert results(calls) == [[2, 2]] * 2
        else:
            errors = [failure.error for failure in failures(calls)]
            assert len({str(error) for error in errors}) == 1
            assert isinstance(errors[0], PeerLost)
        await_lane(services, job, (0, 1))
