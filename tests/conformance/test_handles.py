"""Handles of ops: whatever says that an op is done says that its result is in the tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import handle_programs
from tests.conformance.conftest import OP_SECONDS
from tests.support.processes.ranks import Job, RankPool

SHAPES = {"1x2": (0, 0), "2x1": (0, 1)}
SIZES = {"short": 100, "long": 20_000}


@pytest.fixture(scope="module", params=SHAPES)
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather", "message"])
def test_an_op_that_says_it_is_completed_has_its_result_and_writes_no_more(
    job: Job, kind: str, size: str
) -> None:
    found = job.run(handle_programs.polled, kind=kind, numel=SIZES[size])
    assert found == [[True, True]] * 2


@pytest.mark.parametrize("size", SIZES)
def test_the_result_of_an_op_whose_handle_was_dropped_comes_without_another_call(
    job: Job, size: str
) -> None:
    assert job.run(handle_programs.dropped, numel=SIZES[size]) == [True, True]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_after_any_sign_of_completion_the_result_is_there_and_the_tensor_is_the_programs(
    pool: RankPool, shape: str, seed: int
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        assert job.run(handle_programs.random_asks, seed=seed, steps=60) == [60, 60]
