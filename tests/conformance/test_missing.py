"""A rank that does not call: the others are told who it is when the deadline has passed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_core.errors import PeerMissing
from tests.conformance import programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Failure, Job, RankPool, failures

TIMEOUT = 0.6
SHORT_TIMEOUT = 0.1
TRIALS = 36


@pytest.fixture(scope="module", params=["1x3", "2x2", "3x1"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        works(job)  # all have imported the program: else one may be late for that
        yield job


def missed(found: list[Failure], absent: list[int], job: Job) -> PeerMissing:
    """All failures are the same one, which names the absent ranks and their nodes."""
    assert len({str(failure.error) for failure in found}) == 1, [str(each) for each in found]
    error = found[0].error
    assert isinstance(error, PeerMissing), str(error)
    assert error.details["missing_ranks"] == absent
    for rank in absent:
        assert f"rank {rank} on node {job.nodes[rank]} has not called it" in error.message
    return error


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce", "barrier"])
def test_the_others_are_told_who_is_missing_and_the_late_one_gets_the_same_at_once(
    job: Job, kind: str
) -> None:
    options = {"root": 1} if kind in ("broadcast", "reduce") else {}
    absent = {"all_reduce": 0, "broadcast": 1, "reduce": 2, "barrier": job.world_size - 1}[kind]
    calls = [
        job.start(rank, programs.call, kind=kind, timeout=TIMEOUT, **options)
        for rank in range(job.world_size)
        if rank != absent
    ]
    found = failures(calls)
    error = missed(found, [absent], job)
    assert f"timed out after its timeout of {TIMEOUT:g} s" in error.message
    for failure in found:
        assert TIMEOUT * 0.9 <= failure.seconds < TIMEOUT + 4.0
    late = job.start(absent, programs.call, kind=kind, **options).failure()
    assert str(late.error) == str(error)
    assert late.seconds < TIMEOUT
    works(job)


def test_all_who_are_missing_are_named(job: Job) -> None:
    first = job.start(0, programs.call, timeout=TIMEOUT)
    absent = list(range(1, job.world_size))
    missed([first.failure()], absent, job)
    missed(failures([job.start(rank, programs.call) for rank in absent]), absent, job)
    works(job)


def test_what_the_missing_rank_did_last_is_told(job: Job) -> None:
    works(job)
    called = job.start(1, programs.counted).result()
    error = job.start(1, programs.call, timeout=TIMEOUT).failure().error
    assert f"its last op was {called - 1}" in error.message
    failures([job.start(rank, programs.call) for rank in range(job.world_size) if rank != 1])
    works(job)


def test_the_shortest_timeout_of_all_ranks_counts(job: Job) -> None:
    calls = [
        job.start(rank, programs.call, timeout=TIMEOUT if rank == 0 else OP_SECONDS)
        for rank in range(job.world_size - 1)
    ]
    found = failures(calls)
    missed(found, [job.world_size - 1], job)
    assert max(failure.seconds for failure in found) < OP_SECONDS / 2
    job.start(job.world_size - 1, programs.call).failure()
    works(job)


def test_a_rank_that_calls_twice_does_not_stand_in_for_another(job: Job) -> None:
    """Its second call is the next op, which then waits for all the others."""
    last = job.world_size - 1
    twice = job.start(0, programs.call_twice, timeout=TIMEOUT)
    rest = [job.start(rank, programs.call, timeout=TIMEOUT) for rank in range(1, last)]
    missed(failures(rest), [last], job)
    first, second = twice.result()
    assert f"rank {last} " in first
    assert f"rank {last} " in second
    # Those who have not called yet are told so, for as many ops as have failed.
    failures([job.start(rank, programs.call) for rank in range(1, job.world_size)])
    job.start(last, programs.call).failure()
    works(job)


def test_a_late_rank_within_the_deadline_is_no_error(job: Job) -> None:
    calls = [
        job.start(rank, programs.call, delay=0.5 if rank == 1 else 0.0)
        for rank in range(job.world_size)
    ]
    total = sum(range(1, job.world_size + 1))
    assert [call.result() for call in calls] == [[total] * 4] * job.world_size


def test_waiting_for_less_than_the_deadline_leaves_the_op_in_flight(job: Job) -> None:
    others = [job.start(rank, programs.call, delay=0.4) for rank in range(1, job.world_size)]
    message, result = job.start(0, programs.wait_twice, seconds=0.1).result()
    assert "still in flight" in message
    assert [call.result() for call in others] == [result] * len(others)


def test_a_call_at_the_very_deadline_has_one_outcome_for_all(job: Job) -> None:
    """Either all have the result or all have the error, however close it was."""
    total = sum(range(1, job.world_size + 1))
    failed = 0
    for trial in range(TRIALS):
        # One rank is late, or two, on one node or on two.
        late = {trial % job.world_size, (trial // 2) % job.world_size}
        delay = SHORT_TIMEOUT + trial % 12 * 0.01
        calls = [
            job.start(
                rank, programs.call, timeout=SHORT_TIMEOUT, delay=delay if rank in late else 0.0
            )
            for rank in range(job.world_size)
        ]
        answers = [call.answer() for call in calls]
        messages = {answer.get("error", {}).get("message") for answer in answers}
        assert len(messages) == 1, (trial, answers)
        failed += messages != {None}
        if messages == {None}:
            assert [answer["result"] for answer in answers] == [[total] * 4] * job.world_size
    print(f"{failed} of {TRIALS} failed")
    works(job)
