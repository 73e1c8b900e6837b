"""A call that one rank alone cannot make: it hears why, the others whose it is, and all go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allfold_core.errors import (
    AllfoldError,
    ArenaExhausted,
    BroadcastMultipleTensors,
    InvalidArgument,
    PeerRefused,
)
from tests.conformance import refusal_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.conformance.lane_status import await_lane
from tests.conformance.refusals import refused_on, works
from tests.support.processes.ranks import Job, RankPool, failures
from tests.support.processes.services import Services

SHORT, LONG = 10, 50_000


@pytest.fixture(scope="module", params=["1x3", "2x2", "3x1"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("an argument", InvalidArgument),
        ("an option", InvalidArgument),
        ("an option of a call that is like an earlier one", InvalidArgument),
        ("a call that would not be waited for", InvalidArgument),
        ("no memory", ArenaExhausted),
    ],
)
def test_the_others_hear_at_once_who_could_not_call_what_and_why(
    job: Job, how: str, told: type[AllfoldError]
) -> None:
    """Whichever rank it is, and whatever has kept it from the call."""
    works(job)
    for rank in (0, job.world_size - 1):
        error = refused_on(job, rank, refusal_programs.refused, call="all_reduce", how=how)
        assert isinstance(error, told)
    works(job)


def test_a_call_like_an_earlier_one_is_refused_in_the_same_way(job: Job) -> None:
    assert job.run(refusal_programs.large) == [job.world_size] * job.world_size
    how = "no memory for a call that is like an earlier one"
    error = refused_on(job, 1, refusal_programs.refused, call="all_reduce", how=how)
    assert isinstance(error, ArenaExhausted)
    works(job)


def test_who_calls_after_the_refusal_hears_of_it_as_well(job: Job) -> None:
    last = job.world_size - 1
    refused = job.start(last, refusal_programs.refused, how="an argument").failure()
    assert isinstance(refused.error, InvalidArgument)
    found = [
        job.start(rank, refusal_programs.refused, how="an option").failure().error if rank == 1
        else job.start(rank, refusal_programs.large).failure().error
        for rank in range(last)
    ]  # fmt: skip
    for rank, error in enumerate(found):
        assert isinstance(error, InvalidArgument if rank == 1 else PeerRefused)
    works(job)


@pytest.mark.parametrize("numel", [SHORT, LONG], ids=["short", "long"])
def test_of_many_ops_in_flight_only_those_fail_that_a_rank_cannot_call(
    job: Job, services: Services, numel: int
) -> None:
    """Also if several ranks cannot, or none can, and wherever the others have posted theirs."""
    if numel == SHORT:
        await_lane(services, job)
    ranks, count = range(job.world_size), 30
    refusing = {str(rank): [20] for rank in ranks} | {"0": [5, 6, 20, 29], "1": [6, 20]}
    found = job.run(refusal_programs.in_flight, count=count, numel=numel, refusing=refusing)
    failed = [5, 6, 20, 29]
    for rank, (right, errors) in enumerate(found):
        assert right == [number for number in range(count) if number not in failed]
        mine = refusing[str(rank)]
        codes = {n: (InvalidArgument if n in mine else PeerRefused).code for n in failed}
        assert errors == {str(number): code for number, code in codes.items()}
    works(job)
    if numel == SHORT:
        await_lane(services, job)


def test_all_ranks_of_a_broadcast_without_a_root_stay_in_step(job: Job) -> None:
    """It takes two ops; none, one or both of them may be called."""
    program = refusal_programs.broadcast
    first, last = "0", str(job.world_size - 1)
    told = [failure.error for failure in failures(job.start_all(program, what={last: "no time"}))]
    assert isinstance(told[-1], InvalidArgument)
    assert {type(error) for error in told[:-1]} == {PeerRefused}
    works(job)
    for failure in failures(job.start_all(program, what={last: "a list"})):
        assert isinstance(failure.error, InvalidArgument)
    works(job)
    for failure in failures(job.start_all(program, what={first: "a tensor", last: "a list"})):
        assert type(failure.error) is BroadcastMultipleTensors
    works(job)
    assert job.run(program, what={first: "a tensor"}) == [[1, 1, 1]] * job.world_size


def test_a_group_that_outlives_its_ranks_goes_on_with_all_of_them(pool: RankPool) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, on_loss="shrink") as job:
        refused_on(job, 3, refusal_programs.refused, call="all_reduce", how="an argument")
        works(job)
