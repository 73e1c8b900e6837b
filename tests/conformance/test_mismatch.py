"""Ranks that ask for different things: everyone learns it, at once, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from allfold_core.errors import MismatchError
from tests.conformance import programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures
from tests.support.processes.services import Services

# Generous, because the machine may be busy; what was measured is printed.
SECONDS = 5.0

Options = dict[str, Any]

ALL_REDUCE: Options = {"kind": "all_reduce", "shape": [8]}
BROADCAST: Options = {"kind": "broadcast", "shape": [8], "root": 0}
REDUCE: Options = {"kind": "reduce", "shape": [8], "root": 0}

# What the others call, what the odd rank calls, and the words that show the two sides.
CASES: dict[str, tuple[Options, Options, str, str]] = {
    "shape": (ALL_REDUCE, {"shape": [9]}, "float32[8]", "float32[9]"),
    "shape of equal size": (ALL_REDUCE, {"shape": [2, 4]}, "float32[8]", "float32[2, 4]"),
    "large shape": (
        {"kind": "all_reduce", "shape": [300_000]},
        {"shape": [8]},
        "float32[300000]",
        "float32[8]",
    ),
    "dtype": (ALL_REDUCE, {"dtype": "int32"}, "float32[8]", "int32[8]"),
    "dtypes of equal size": (
        BROADCAST | {"dtype": "uint64"},
        {"dtype": "timedelta64[s]"},
        "uint64[8]",
        "timedelta64[s][8]",
    ),
    "dtype and its bytes": (
        BROADCAST | {"dtype": "uint16"},
        {"dtype": "uint8", "shape": [8, 2]},
        "uint16[8]",
        "uint8[8, 2]",
    ),
    "large dtype and its bytes": (
        BROADCAST | {"dtype": "uint16", "shape": [100_000]},
        {"dtype": "uint8", "shape": [100_000, 2]},
        "uint16[100000]",
        "uint8[100000, 2]",
    ),
    "complex numbers and their parts": (
        ALL_REDUCE | {"dtype": "complex64"},
        {"dtype": "float32", "shape": [8, 2]},
        "complex64[8]",
        "float32[8, 2]",
    ),
    "op": (ALL_REDUCE, {"op": "max"}, "sum", "max"),
    "strategy": (ALL_REDUCE, {"strategy": "chain"}, "float32[8])", "strategy=chain"),
    "kind": (ALL_REDUCE, BROADCAST, "all_reduce(", "broadcast("),
    "barrier": (ALL_REDUCE, {"kind": "barrier"}, "all_reduce(", "barrier("),
    "root of a broadcast": (BROADCAST, {"root": 1}, "root=0", "root=1"),
    "last root of a broadcast": (BROADCAST, {"root": 2}, "root=0", "root=2"),
    "root of a reduction": (REDUCE, {"root": 1}, "root=0", "root=1"),
    "last root of a reduction": (REDUCE, {"root": 2}, "root=0", "root=2"),
    "reduction and broadcast": (REDUCE, BROADCAST, "reduce(", "broadcast("),
}


@pytest.fixture(scope="module", params=["1x3", "2x2", "3x1"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def options_of(common: Options, own: Options) -> Options:
    """The odd rank's call: of another kind altogether, or the common one with a difference."""
    return own if "kind" in own else common | own


def call_with_the_odd_one_last(
    job: Job, services: Services, odd: int, common: Options, own: Options
) -> list[Call]:
    """Begin the calls of an op; the odd one when the agents have got all the others.

    It is judged as soon as two calls differ: before the third is there, either may be the odd one.
    """
    last = services.group_status(job.nodes[0], job.name)["last_seq"]["0"]
    others = [rank for rank in range(job.world_size) if rank != odd]
    calls = {rank: job.start(rank, programs.call, **common) for rank in others}
    for rank in others:
        await_called(services, job, int(last) + 1, rank)
    calls[odd] = job.start(odd, programs.call, **options_of(common, own))
    return [calls[rank] for rank in range(job.world_size)]


def agree_on_an_error(calls: list[Call], odd: list[int]) -> MismatchError:
    """All calls fail with one and the same mismatch, soon after the last of them was made."""
    found = failures(calls)
    errors = [failure.error for failure in found]
    assert {type(error) for error in errors} == {MismatchError}, [str(error) for error in errors]
    assert len({str(error) for error in errors}) == 1, [str(error) for error in errors]
    took = max(each.ended for each in found) - max(each.began for each in found)
    print(f"{took * 1000:.0f} ms after the last call")
    assert took < SECONDS
    error = errors[0]
    assert isinstance(error, MismatchError)
    assert error.details["odd_ranks"] == odd, str(error)
    return error


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    for kind in ("all_reduce", "broadcast"):
        options = {"root": 0} if kind == "broadcast" else {}
        right = 1 if kind == "broadcast" else total
        assert job.run(programs.call, kind=kind, **options) == [[right] * 4] * job.world_size


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told_at_once_who_is_odd_and_both_sides(
    job: Job, services: Services, case: str
) -> None:
    """Whichever rank is the odd one; and the op after it works."""
    common, own, expected, got = CASES[case]
    for odd in range(job.world_size):
        calls = call_with_the_odd_one_last(job, services, odd, common, own)
        error = agree_on_an_error(calls, [odd])
        assert f"rank {odd} (node {job.nodes[odd]}) called" in error.message
        assert expected in error.message
        assert got in error.message
        works(job)


@pytest.mark.parametrize("arena", [False, True])
def test_the_tensors_of_a_failed_op_are_as_they_were(
    job: Job, services: Services, arena: bool
) -> None:
    """The program checks it, bit for bit; here the result would come in place."""
    for odd in range(job.world_size):
        calls = call_with_the_odd_one_last(
            job, services, odd, {"shape": [100], "arena": arena}, {"shape": [101]}
        )
        agree_on_an_error(calls, [odd])
    works(job)


def test_who_calls_after_the_verdict_gets_the_same_error_at_once(job: Job) -> None:
    """It may be the odd one, or one who would have been right."""
    last = job.world_size - 1
    for odd, late in product((0, last), repeat=2):
        third = next(rank for rank in range(job.world_size) if rank not in (odd, late))
        # A late odd rank has nobody to disagree with, so another one is odd, too.
        strange = {odd, third} if odd == late else {odd}
        early = [
            job.start(rank, programs.call, dtype="int32" if rank in strange else "float32")
            for rank in range(job.world_size)
            if rank != late
        ]
        errors = [failure.error for failure in failures(early)]
        call = job.start(late, programs.call, dtype="int32" if late in strange else "float32")
        failure = call.failure()
        assert {str(error) for error in errors} == {str(failure.error)}
        assert failure.seconds < 1.0
        works(job)


def test_sides_of_equal_size_are_both_shown(job: Job) -> None:
    """Then the side of the lowest rank is taken for right."""
    half = job.world_size // 2
    calls = [
        job.start(rank, programs.call, op="min" if rank >= job.world_size - half else "sum")
        for rank in range(job.world_size)
    ]
    agree_on_an_error(calls, list(range(job.world_size - half, job.world_size)))
    works(job)


def test_three_different_calls_are_all_shown(job: Job) -> None:
    calls = [
        job.start(rank, programs.call, shape=[5 + max(0, rank - job.world_size + 3)])
        for rank in range(job.world_size)
    ]
    odd = [job.world_size - 2, job.world_size - 1]
    error = agree_on_an_error(calls, odd)
    for shape in ("[5]", "[6]", "[7]"):
        assert shape in error.message
    works(job)


def test_of_many_ops_in_flight_only_the_odd_one_fails(job: Job) -> None:
    outcomes = job.run(programs.in_flight_with_an_odd_one, count=40, odd=17)
    for right, errors in outcomes:
        assert right == [number for number in range(40) if number != 17]
        assert list(errors) == ["17"]
    assert len({error for _, errors in outcomes for error in errors.values()}) == 1
    works(job)
