"""The short lane between nodes: it opens, short ops go by it, and it closes when it has to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allfold_core.errors import MismatchError, PeerLost, PeerMissing
from tests.conformance import lane_programs, programs, survival_programs
from tests.conformance.conftest import OP_SECONDS
from tests.conformance.lane_status import SHAPES, assert_same_bits, await_lane, frames, is_open
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

TIMEOUT = 0.6


@pytest.fixture(scope="module", params=SHAPES)
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


@pytest.fixture
def lane(job: Job, services: Services) -> Job:
    """A job whose lane is open."""
    await_lane(services, job)
    return job


# While all is well


def test_each_op_is_one_frame_from_each_node_to_each(lane: Job, services: Services) -> None:
    nodes = lane.node_names
    before = {node: frames(services, node, lane.name) for node in nodes}
    assert lane.run(lane_programs.count_posted, count=50) == [50] * lane.world_size
    for node in nodes:
        assert frames(services, node, lane.name) - before[node] == 50 * (len(nodes) - 1)


@pytest.mark.parametrize("numel", [1, 100, 2000], ids=["tiny", "small", "near a slot"])
def test_the_results_of_all_kinds_are_right(lane: Job, services: Services, numel: int) -> None:
    assert lane.run(lane_programs.all_kinds, first=0, count=40, numel=numel) == (
        [40] * lane.world_size
    )
    assert is_open(services, lane, lane.node_names)


def test_short_and_long_ops_may_follow_each_other(lane: Job, services: Services) -> None:
    assert lane.run(lane_programs.short_and_long, count=24) == [24] * lane.world_size
    assert is_open(services, lane, lane.node_names)


def test_the_bits_do_not_depend_on_the_lane(lane: Job, services: Services) -> None:
    for numel in (1, 1000, 16_000):
        assert_same_bits(services, lane, numel)
    assert_same_bits(services, lane, 1000, "float16")


@pytest.mark.parametrize(
    ("numel", "each"), [(4, 1), (80_000, 2)], ids=["a whole result", "a part, and a word"]
)
def test_only_a_long_op_whose_result_is_in_parts_takes_a_word_more(
    lane: Job, services: Services, numel: int, each: int
) -> None:
    before = frames(services, "node0", lane.name)
    seq = lane.run(programs.counted)[0]
    lane.run(programs.call, kind="reduce", root=0, shape=(numel,))
    others = len(lane.node_names) - 1
    assert frames(services, "node0", lane.name) == before + each * others
    assert lane.run(programs.counted)[0] == seq + 1


def test_more_async_ops_than_there_are_slots_are_right_and_the_lane_opens_again(
    lane: Job, services: Services
) -> None:
    for _ in range(3):
        assert lane.run(lane_programs.burst, count=60) == [60] * lane.world_size
    for seed in range(2):
        assert lane.run(programs.many_in_flight, count=80, seed=seed) == [0] * lane.world_size
    await_lane(services, lane)


def test_a_lane_that_closes_amid_results_in_parts_gives_each_rank_its_own(
    lane: Job, services: Services
) -> None:
    """Behind many that are done; a burst has more ops than slots, so that some are messages."""
    assert lane.run(lane_programs.many_in_parts, count=64) == [64] * lane.world_size
    assert lane.run(lane_programs.burst_in_parts, count=60) == [60] * lane.world_size
    await_lane(services, lane)


# Calls that cannot be done


@pytest.mark.parametrize(
    "own",
    [
        {"shape": [9]},
        {"op": "max"},
        {"kind": "barrier"},
        {"shape": [300_000]},
        {"kind": "reduce", "root": 0},
    ],
    ids=["shape", "op", "kind", "one that is long", "one that is not of the lane"],
)
def test_calls_that_differ_fail_everywhere_and_the_lane_opens_again(
    job: Job, services: Services, own: dict[str, Any]
) -> None:
    """The rank that differs is one of two on its node, then the only one on its node."""
    for odd in {0, job.world_size - 1}:
        await_lane(services, job)
        calls = [
            job.start(rank, programs.call, **({"shape": [8]} | (own if rank == odd else {})))
            for rank in range(job.world_size)
        ]
        errors = [failure.error for failure in failures(calls, OP_SECONDS / 2)]
        assert {type(error) for error in errors} == {MismatchError}
        assert len({str(error) for error in errors}) == 1
    await_lane(services, job)


def test_who_does_not_call_is_named_when_the_deadline_has_passed(
    job: Job, services: Services
) -> None:
    for absent in {0, job.world_size - 1}:
        await_lane(services, job)
        calls = [
            job.start(rank, programs.call, timeout=TIMEOUT)
            for rank in range(job.world_size)
            if rank != absent
        ]
        errors = [failure.error for failure in failures(calls)]
        assert len({str(error) for error in errors}) == 1, errors
        assert isinstance(errors[0], PeerMissing)
        assert errors[0].details["missing_ranks"] == [absent]
        late = job.start(absent, programs.call).failure()
        assert str(late.error) == str(errors[0])
    await_lane(services, job)


# Losses


def call_without(job: Job, services: Services, victim: int) -> list[Call]:
    """All but one call a short op; returns when their agents know that they have."""
    left = [rank for rank in range(job.world_size) if rank != victim]
    seq = job.start(left[0], programs.counted).result()
    calls = [job.start(rank, lane_programs.participants, numel=8) for rank in left]
    for rank in left:
        await_called(services, job, seq, rank)
    return calls


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_is_killed_while_others_wait_fails_their_op_and_is_named(
    pool: RankPool, services: Services, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        victim = job.world_size - 1
        calls = call_without(job, services, victim)
        job.ranks[victim].kill()
        errors = [failure.error for failure in failures(calls)]
        assert len({str(error) for error in errors}) == 1
        assert isinstance(errors[0], PeerLost)
        assert errors[0].details["ranks"] == [victim]
        await_lane(services, job, range(victim))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_that_is_killed_while_others_wait_takes_nothing_from_ops_that_shrink(
    pool: RankPool, services: Services, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS, on_loss="shrink") as job:
        await_lane(services, job)
        victim = job.world_size - 1
        calls = call_without(job, services, victim)
        job.ranks[victim].kill()
        assert results(calls) == [[victim, victim]] * victim
        await_lane(services, job, range(victim))


@pytest.mark.parametrize("victim", ["rank", "agent"])
@pytest.mark.parametrize("shape", ["2x2", "4x1"])
def test_all_survivors_have_done_the_same_ops_when_some_are_killed(
    pool: RankPool, services: Services, tmp_path: Path, shape: str, victim: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        await_lane(services, job)
        calls = job.start_all(lane_programs.until_lost, folder=str(tmp_path))
        wait_until(lambda: len(list(tmp_path.iterdir())) >= job.world_size, "ops are done")
        last = job.nodes[-1]
        if victim == "agent":
            services.kill_agent(last)
            left = [rank for rank, node in enumerate(job.nodes) if node != last]
        else:
            job.ranks[-1].kill()
            left = list(range(job.world_size - 1))
        told = results([calls[rank] for rank in left])
        assert len({str(each) for each in told}) == 1, told
        await_lane(services, job, left)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["2x2", "4x1"])
def test_an_agent_that_is_killed_costs_ops_that_shrink_no_result(
    pool: RankPool, services: Services, tmp_path: Path, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS, on_loss="shrink") as job:
        await_lane(services, job)
        calls = job.start_all(survival_programs.shrink, numel=10, folder=str(tmp_path))
        wait_until(lambda: len(list(tmp_path.iterdir())) >= job.world_size, "ops are done")
        last = job.nodes[-1]
        services.kill_agent(last)
        left = [rank for rank, node in enumerate(job.nodes) if node != last]
        others = sorted({job.nodes[rank] for rank in left})
        wait_until(
            lambda: all(services.group_status(node, job.name)["epoch"] for node in others),
            "the others go on without it",
        )
        (tmp_path / "stop").touch()
        told = results([calls[rank] for rank in left])
        assert len({str(each["counts"]) for each in told}) == 1, told
        await_lane(services, job, left)
