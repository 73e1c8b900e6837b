"""Blocks that cannot be: refused on one rank, of which the others hear, or told to every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from allfold_core.errors import AllfoldError, InvalidArgument, MismatchError
from tests.conformance import collective_programs
from tests.conformance.conftest import SHAPES
from tests.conformance.refusals import refused_on, works
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures
from tests.support.processes.services import Services


def refusals(world: int) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """A kind, tensors and options as rank 0 brings them, and words of the refusal."""
    row = [2, 3]
    whole = [2 * world, 3]
    yield "all_gather", {"tensor": row, "output": [2 * world, 2]}, {}, f"have {6 * world} elements"
    yield "all_gather", {"tensor": row, "output": [row] * (world - 1)}, {}, "list of blocks"
    yield (
        "all_gather",
        {"tensor": row},
        {"counts": [2] * (world + 1)},
        "counts has one whole number",
    )
    yield "all_gather", {"tensor": row}, {"counts": [-2] * world}, "counts has one whole number"
    yield "all_gather", {"tensor": row}, {"counts": [3] * world}, "has 2 rows, but counts says 3"
    uneven = [row, *[[3, 3]] * (world - 1)]
    yield "all_gather", {"tensor": [3, 3], "output": uneven}, {}, "the block of rank 0"
    yield "gather", {"tensor": row, "output": [1]}, {"root": 0}, f"have {6 * world} elements"
    yield "gather", {"tensor": row, "output": whole}, {"root": 1}, "only the root, rank 1"
    yield "gather", {"tensor": row}, {"root": world}, f"root {world} is not a rank"
    yield "scatter", {"output": row}, {"root": 0}, "rank 0 passed none"
    yield "scatter", {"output": row, "inputs": whole}, {"root": 1}, "rank 0 passed some"
    yield "scatter", {"output": row, "inputs": [5, 3]}, {"root": 0}, "15"
    yield "reduce_scatter", {"inputs": [2 * world + 1, 3]}, {}, "cannot be split evenly"
    yield "reduce_scatter", {"inputs": whole, "output": [1, 3]}, {}, f"has {6 * world}"
    yield "reduce_scatter", {"inputs": [row] * (world + 1)}, {}, f"got {world + 1}"
    yield "reduce_scatter", {"inputs": whole}, {"op": "median"}, "unknown reduce operation"
    yield "reduce_scatter", {"inputs": whole}, {"op": "band"}, "band of float32 is not defined"
    yield "reduce_scatter", {"inputs": whole}, {"op": "premul_sum"}, "factor= belong together"
    yield "reduce_scatter", {"inputs": whole}, {"factor": 2.0}, "factor= belong together"
    yield "all_to_all", {"inputs": [2 * world + 1]}, {}, "cannot be split evenly"
    yield "all_to_all", {"inputs": whole}, {"send_counts": [1] * world}, f"adds up to {world} row"
    yield "all_to_all", {"inputs": whole, "output": [2 * world, 4]}, {}, "must be equal"
    yield "all_to_all", {"inputs": [row] * world, "output": whole}, {}, "as many out"
    yield "all_to_all", {"inputs": [row]}, {}, f"has {world} tensor"
    lists = {"inputs": [row] * world, "output": [row] * world}
    yield "all_to_all", lists, {"send_counts": [2] * world}, "pass no counts"
    yield "all_reduce", {"tensor": []}, {"wire": "int3"}, "unknown wire format 'int3'"


def test_sizes_that_do_not_fit_are_refused_and_the_others_hear_of_it(job: Job) -> None:
    shaped = collective_programs.shaped
    for kind, given, options, words in refusals(job.world_size):
        error = refused_on(job, 0, shaped, call=kind, kind=kind, tensors_of=given, **options)
        assert isinstance(error, InvalidArgument), (kind, given, options, error)
        assert words in error.message, (kind, given, options)
    works(job)


def start_with_the_odd_one_last(
    job: Job, services: Services, odd: int, calls: Sequence[dict[str, Any]]
) -> list[Call]:
    """Begin the calls of an op; the odd one when the agents have got all the others.

    It is judged as soon as two calls differ: before the third is there, either may be the odd one.
    """
    seq = int(services.group_status(job.nodes[0], job.name)["last_seq"]["0"]) + 1
    others = [rank for rank in range(job.world_size) if rank != odd]
    started = {rank: job.start(rank, collective_programs.shaped, **calls[rank]) for rank in others}
    for rank in others:
        await_called(services, job, seq, rank)
    started[odd] = job.start(odd, collective_programs.shaped, **calls[odd])
    return [started[rank] for rank in range(job.world_size)]


def fail_everywhere(job: Job, started: Sequence[Call]) -> AllfoldError:
    """The one error of calls that do not fit together; the next op works."""
    errors = [failure.error for failure in failures(started)]
    assert len({str(error) for error in errors}) == 1, [str(error) for error in errors]
    assert {type(error) for error in errors} == {MismatchError}
    works(job)
    return errors[0]


def test_counts_that_differ_between_ranks_are_told_to_all(job: Job, services: Services) -> None:
    world = job.world_size
    right, other = [1] * (world - 1) + [2], [1] * (world - 2) + [3, 2]
    odd = 0  # its own block is the same in both
    for kind in ("all_gather", "reduce_scatter", "gather", "scatter"):
        calls = []
        for rank in range(world):
            counts = other if rank == odd else right
            block, whole = [counts[rank]], [sum(counts)]
            given: dict[str, dict[str, list[int] | None]] = {
                "all_gather": {"tensor": block},
                "gather": {"tensor": block},
                "reduce_scatter": {"inputs": whole},
                "scatter": {"output": block, "inputs": whole if rank == 0 else None},
            }
            calls.append({"kind": kind, "tensors_of": given[kind], "counts": counts})
        error = fail_everywhere(job, start_with_the_odd_one_last(job, services, odd, calls))
        assert error.details["odd_ranks"] == [odd]
        assert str(tuple(right)) in error.message
        assert str(tuple(other)) in error.message


def test_blocks_of_another_size_are_told_to_all(job: Job, services: Services) -> None:
    for odd in range(job.world_size):
        calls = [
            {"kind": "all_gather", "tensors_of": {"tensor": [4 if rank == odd else 3]}}
            for rank in range(job.world_size)
        ]
        error = fail_everywhere(job, start_with_the_odd_one_last(job, services, odd, calls))
        assert error.details["odd_ranks"] == [odd]
        assert "float32[3]" in error.message
        assert "float32[4]" in error.message


def disagree(job: Job, giver: int, taker: int) -> None:
    """An all-to-all in which one rank sends another more than that expects."""
    world = job.world_size
    calls = []
    for rank in range(world):
        sent, received = [1] * world, [1] * world
        if rank == giver:
            sent[taker] = 3
        given = {"inputs": [sum(sent)], "output": [sum(received)]}
        options = {"send_counts": sent, "receive_counts": received}
        calls.append({"kind": "all_to_all", "tensors_of": given, **options})
    started = [job.start(rank, collective_programs.shaped, **own) for rank, own in enumerate(calls)]
    error = fail_everywhere(job, started)
    sides = [f"rank {rank} (node {job.nodes[rank]})" for rank in (giver, taker)]
    assert f"{sides[0]} sends 3 rows to {sides[1]}, which expects 1" in error.message
    assert error.details["odd_ranks"] == sorted({giver, taker})


def test_two_ranks_of_a_node_that_expect_different_sizes_of_each_other_are_named(job: Job) -> None:
    ranks = range(job.world_size)
    for giver, taker in product(ranks, ranks):
        if job.nodes[giver] == job.nodes[taker]:
            disagree(job, giver, taker)


@pytest.mark.parametrize("shape", ["2x2", "3x1"])
def test_two_ranks_of_two_nodes_that_expect_different_sizes_of_each_other_are_named(
    pool: RankPool, shape: str
) -> None:
    """Also to ranks that neither send to them nor receive anything wrong."""
    with pool.job(SHAPES[shape], timeout=2.0) as job:
        last = job.world_size - 1
        for giver, taker in ((0, last), (last, 0)):
            disagree(job, giver, taker)


def test_blocks_and_other_collectives_are_not_the_same_op(job: Job, services: Services) -> None:
    """A list of equal blocks is the same as a tensor of them; other things are not."""
    world = job.world_size
    listed = {"tensor": [3], "output": [[3]] * world}
    calls = [
        job.start(
            rank,
            collective_programs.shaped,
            kind="all_gather",
            tensors_of=listed if rank else {"tensor": [3], "output": [world, 3]},
        )
        for rank in range(world)
    ]
    right = [float(rank + 1) for rank in range(world) for _ in range(3)]
    for call in calls:
        assert [value for each in call.result() for value in each] == right
    for own in (
        {"kind": "all_reduce", "tensors_of": {"tensor": [3]}},
        {"kind": "gather", "tensors_of": {"tensor": [3]}},
        {"kind": "all_gather", "tensors_of": {"tensor": [3]}, "strategy": "centralized"},
    ):
        common = {"kind": "all_gather", "tensors_of": {"tensor": [3]}}
        each = [own if rank == 1 else common for rank in range(world)]
        error = fail_everywhere(job, start_with_the_odd_one_last(job, services, 1, each))
        assert error.details["odd_ranks"] == [1]
