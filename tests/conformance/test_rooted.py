"""Reduce and broadcast: every strategy, every root, on any node."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest

from allfold_core.errors import (
    AllfoldError,
    BroadcastMultipleTensors,
    BroadcastNoTensor,
    InvalidArgument,
)
from allfold_core.operations import Kind
from tests.conformance import exact, programs
from tests.support import tensors
from tests.support.cases import digest, encode, expected, inputs, numels
from tests.support.processes.ranks import Job, failures, results
from tests.support.strategies import names_of

STRATEGIES = names_of(Kind.REDUCE, 1, 4)
SEVERAL_CHUNKS = 600_011
LATE_SECONDS = 0.1


def roots_and_sizes(job: Job) -> list[tuple[int, int]]:
    """Every root with every size, and the last one with a tensor of several chunks."""
    sizes = numels(job.world_size, len(job.node_names))
    last = job.world_size - 1
    return [*product(range(job.world_size), sizes), (last, SEVERAL_CHUNKS)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reduction_is_exact_at_every_root_and_leaves_the_others_alone(
    job: Job, strategy: str
) -> None:
    kinds = cycle([("sum", "float32"), ("mean", "bfloat16"), ("max", "int64")])
    rows = [
        (strategy, root, *kind, numel)
        for (root, numel), kind in zip(roots_and_sizes(job), kinds, strict=False)
    ]
    got = job.run(exact.reduce_cases, rows=rows)
    for number, row in enumerate(rows):
        _, root, op, dtype, numel = row
        for rank in range(job.world_size):
            own = encode(inputs(op, dtype, numel, rank), dtype)
            right = expected(op, dtype, numel, job.world_size) if rank == root else own
            assert got[rank][number][0] == digest(right), (row, rank, got[rank][number])


@pytest.mark.parametrize("arena", [False, True])
def test_a_reduction_leaves_any_bits_of_the_others_as_they_are(job: Job, arena: bool) -> None:
    for root, strategy in product(range(job.world_size), STRATEGIES):
        untouched = job.run(exact.untouched_by_reduce, root=root, strategy=strategy, arena=arena)
        assert untouched == [rank != root for rank in range(job.world_size)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_broadcast_gives_every_rank_the_bits_of_every_root(job: Job, strategy: str) -> None:
    dtypes = cycle(["float32", "bfloat16", "uint8"])
    rows = [
        (strategy, root, dtype, numel)
        for (root, numel), dtype in zip(roots_and_sizes(job), dtypes, strict=False)
    ]
    got = job.run(exact.broadcast_cases, rows=rows)
    for number, row in enumerate(rows):
        _, root, dtype, numel = row
        right = digest(tensors.to_bytes(exact.raw(dtype, numel, root)))
        assert [rank[number][0] for rank in got] == [right] * job.world_size, row


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reduction_and_a_broadcast_are_an_all_reduce(job: Job, strategy: str) -> None:
    """With the same tree the fold has the same order, so the bits are the same too."""
    last = job.world_size - 1
    pairs = job.run(programs.reduce_and_broadcast, strategy=strategy, root=last)
    assert len({pair["two_steps"] for pair in pairs}) == 1
    assert len({pair["one_step"] for pair in pairs}) == 1
    assert all(pair["close"] for pair in pairs)


@pytest.mark.parametrize("kind", ["reduce", "broadcast"])
def test_nobody_is_done_before_everybody_has_called(job: Job, kind: str) -> None:
    """Else a rank could go on although the op is about to fail for the others."""
    for number, strategy in enumerate(STRATEGIES):
        late, root = number % job.world_size, (number + 1) % job.world_size
        calls = [
            job.start(
                rank,
                programs.call,
                kind=kind,
                root=root,
                strategy=strategy,
                delay=LATE_SECONDS if rank == late else 0.0,
            )
            for rank in range(job.world_size)
        ]
        results(calls)
        times = [call.answer() for call in calls]
        assert min(each["ended"] for each in times) >= times[late]["began"] + LATE_SECONDS, strategy


# Broadcast without a root


@pytest.mark.parametrize("torch", [False, True])
def test_whoever_brings_a_tensor_is_the_source_and_the_others_get_a_new_one(
    job: Job, torch: bool
) -> None:
    for source, (shape, dtype) in product(
        range(job.world_size), [([2, 3], "float32"), ([], "int64"), ([0, 4], "float64")]
    ):
        got = job.run(
            exact.broadcast_without_root,
            sources=[source],
            shape=shape,
            dtype=dtype,
            torch=torch,
        )
        same = [rank.pop("same") for rank in got]
        assert same == [rank == source for rank in range(job.world_size)]
        values = list(range({"float32": 6, "int64": 1, "float64": 0}[dtype]))
        library = "torch" if torch else "numpy"
        right = {"library": library, "dtype": dtype, "shape": shape, "values": values}
        assert got == [right] * job.world_size


def test_a_bfloat16_tensor_comes_out_as_torch_has_it(job: Job) -> None:
    got = job.run(
        exact.broadcast_without_root, sources=[0], shape=[3], dtype="bfloat16", torch=True
    )
    assert {(rank["library"], rank["dtype"]) for rank in got} == {("torch", "bfloat16")}


def _refused_everywhere(job: Job, sources: list[int]) -> list[AllfoldError]:
    calls = job.start_all(
        exact.broadcast_without_root,
        sources=sources,
        shape=[2],
        dtype="float32",
        torch=False,
    )
    errors = [failure.error for failure in failures(calls)]
    assert len({str(error) for error in errors}) == 1
    _works(job)
    return errors


def _works(job: Job) -> None:
    total: list[Any] = [sum(range(1, job.world_size + 1))] * 4
    assert job.run(programs.call) == [total] * job.world_size


def test_a_broadcast_that_nobody_brings_a_tensor_to_is_refused_on_every_rank(job: Job) -> None:
    assert {type(error) for error in _refused_everywhere(job, [])} == {BroadcastNoTensor}


def test_a_broadcast_with_several_tensors_is_refused_on_every_rank_and_names_them(
    job: Job,
) -> None:
    """On one node or on different ones."""
    last = job.world_size - 1
    for sources in ([0, 1], [0, last], [1, last], list(range(job.world_size))):
        for error in _refused_everywhere(job, sources):
            assert isinstance(error, BroadcastMultipleTensors)
            assert error.details["ranks"] == sorted(set(sources))


@pytest.mark.parametrize("what", ["uint16", "datetime", "complex", "torch.bool", "torch.bfloat16"])
def test_what_one_rank_brings_may_be_of_any_type(job: Job, what: str) -> None:
    source = job.world_size - 1
    got = job.run(exact.bring, what=what, source=source)
    assert got == [got[source]] * job.world_size


@pytest.mark.parametrize("what", ["a list", "structured"])
def test_that_one_rank_brings_what_cannot_be_moved_is_told_to_all(job: Job, what: str) -> None:
    for call in job.start_all(exact.bring, what=what, source=0):
        assert isinstance(call.failure().error, InvalidArgument)
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size
