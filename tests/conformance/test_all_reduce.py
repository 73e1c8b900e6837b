"""All-reduce: every strategy, operation, type, shape of the cluster and size, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from tests.conformance import exact, programs
from tests.support.cases import Case, digest, encode, expected, label, numels
from tests.support.processes.ranks import Job, RankPool
from tests.support.processes.services import Services
from tests.support.strategies import names_of
from tests.support.tiers import one_in

Floats = npt.NDArray[np.float32]

STRATEGIES = names_of(Kind.ALL_REDUCE, 1, 4)
OPS = ("sum", "mean", "min", "max", "product")
DTYPES = ("float32", "bfloat16", "int64")
OTHER_DTYPES = ("float64", "float16", "int8", "int16", "int32", "uint8", "bool")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
SEVERAL_CHUNKS = 600_011


def is_defined(op: str, dtype: str) -> bool:
    return op != "mean" or dtype not in INTEGERS


def check(job: Job, cases: list[Case]) -> None:
    """Run the cases on all ranks and compare every result with the reference, bit for bit."""
    got = job.run(exact.all_reduce_cases, rows=[case.row for case in cases], seconds=60)
    wrong: list[Any] = []
    for number, case in enumerate(cases):
        reference = expected(case.op, case.dtype, case.numel, job.world_size)
        digests = [rank[number][0] for rank in got]
        if set(digests) != {digest(reference)}:
            wrong.append((label(case.row), [rank[number][1] for rank in got]))
    assert not wrong, f"{len(wrong)} of {len(cases)} cases, the first: {wrong[0]}"


@pytest.mark.parametrize("strategy", one_in(2, STRATEGIES))
def test_every_operation_type_and_size_is_exact(job: Job, strategy: str) -> None:
    sizes = numels(job.world_size, len(job.node_names))
    cases = [
        Case(op, dtype, numel, strategy)
        for op, dtype, numel in product(OPS, DTYPES, sizes)
        if is_defined(op, dtype)
    ]
    check(job, cases)


@pytest.mark.parametrize("strategy", one_in(4, STRATEGIES))
def test_tensors_of_several_chunks_are_exact(job: Job, strategy: str) -> None:
    kinds = [("sum", "float32"), ("mean", "bfloat16"), ("max", "int64")]
    check(job, [Case(op, dtype, SEVERAL_CHUNKS, strategy) for op, dtype in kinds])


def test_every_other_type_is_exact(job: Job) -> None:
    cases = [
        Case(op, dtype, 1000, "auto")
        for op, dtype in product(OPS, OTHER_DTYPES)
        if is_defined(op, dtype)
    ]
    check(job, cases)


def test_a_ring_of_slices_longer_than_a_chunk_is_exact(job: Job) -> None:
    check(job, [Case("sum", "float32", 1_500_001, "ring")])


def test_a_mean_of_integers_is_refused_on_each_rank_at_once(job: Job) -> None:
    for dtype in INTEGERS:
        for call in job.start_all(programs.call, op="mean", dtype=dtype):
            with pytest.raises(InvalidArgument, match=f"mean of {dtype}"):
                raise call.failure().error
    assert job.run(programs.call, op="max") == [[job.world_size] * 4] * job.world_size


# Rounding and order


def test_half_types_are_rounded_once(job: Job) -> None:
    """256 + 1 is 256 in bfloat16, so a sum that is rounded at every step would stay there."""
    for dtype, large in (("bfloat16", 256), ("float16", 2048)):
        values = [[large if rank == 0 else 1] * 8 for rank in range(job.world_size)]
        right = encode(np.full(8, large + job.world_size - 1), dtype).hex()
        assert right != encode(np.full(8, large), dtype).hex()
        folded = job.run(exact.fold, values=values, strategies=STRATEGIES, dtype=dtype)
        assert folded == [[right] * len(STRATEGIES)] * job.world_size


def test_half_types_are_the_float32_fold_rounded_once(job: Job) -> None:
    values = _wild(job.world_size)
    for dtype in ("bfloat16", "float16"):
        as_given = [_round_trip(row, dtype) for row in values]
        folded = _in_node_order(as_given, job)
        got = _fold(job, as_given, "direct", dtype)
        assert got == encode(folded, dtype), dtype
        mean = encode(folded / np.float32(job.world_size), dtype)
        assert _fold(job, as_given, "direct", dtype, "mean") == mean, dtype


def test_a_mean_of_half_types_does_not_overflow_on_the_way(job: Job) -> None:
    values = [[60000.0] * 3] * job.world_size
    mean = encode(np.full(3, 60000.0, np.float32), "float16")
    assert _fold(job, values, "auto", "float16", "mean") == mean
    overflow = encode(np.full(3, np.inf, np.float32), "float16")
    assert _fold(job, values, "auto", "float16") == overflow


@pytest.mark.parametrize("strategy", ["direct", "direct2"])
def test_meshes_fold_each_nodes_ranks_and_then_the_nodes_in_order(job: Job, strategy: str) -> None:
    values = _wild(job.world_size)
    assert _fold(job, values, strategy) == _in_node_order(values, job).tobytes()


def test_a_ring_folds_in_the_order_of_the_ring(job: Job) -> None:
    """From which node on depends on the slice, so any rotation is right."""
    values = _wild(job.world_size)
    got = np.frombuffer(_fold(job, values, "ring"), np.float32)
    parts = _per_node(values, job)
    rotations = [
        reduce(np.add, parts[first:] + parts[:first]).astype(np.float32)
        for first in range(len(parts))
    ]
    assert np.logical_or.reduce([got == each for each in rotations]).all()


def test_all_ranks_get_the_same_bits_and_get_them_again(job: Job) -> None:
    """Whatever the strategy's order of folding is, with values that make it matter."""
    values = [row.tolist() for row in _wild(job.world_size)]
    for op in ("sum", "mean", "product"):
        first = job.run(exact.fold, values=values, strategies=STRATEGIES, op=op)
        assert all(rank == first[0] for rank in first), op
        assert job.run(exact.fold, values=values, strategies=STRATEGIES, op=op) == first, op
        for strategy, data in zip(STRATEGIES, first[0], strict=True):
            got = np.frombuffer(bytes.fromhex(data), np.float32)
            np.testing.assert_allclose(got, _reference(values, op), 1e-4, 1e-4, err_msg=strategy)


def test_special_values_propagate_with_the_same_bits_on_all_ranks(job: Job) -> None:
    """Element by element: NaN, inf, inf against -inf, and both zeros."""
    ordinary, last = [1.0, 1.0, np.inf, -0.0, 0.0], job.world_size - 1
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    for odd, op in product((0, last), ("sum", "mean", "min", "max", "product")):
        values = [special if rank == odd else ordinary for rank in range(job.world_size)]
        folded = job.run(exact.fold, values=values, strategies=STRATEGIES, op=op)
        assert all(rank == folded[0] for rank in folded), (op, odd)
        for strategy, data in zip(STRATEGIES, folded[0], strict=True):
            got = np.frombuffer(bytes.fromhex(data), np.float32)
            clash = {"min": -np.inf, "max": np.inf, "product": -np.inf}.get(op, np.nan)
            if op == "product" and job.world_size % 2 == 0:
                clash = -np.inf
            right = [np.nan, 1.0 if op == "min" else np.inf, clash, 0.0, 0.0]
            np.testing.assert_array_equal(got, np.array(right), err_msg=f"{op} {strategy}")


# Behind the scenes


def test_every_node_records_the_strategy_that_it_was_asked_for(
    job: Job, services: Services
) -> None:
    for strategy in STRATEGIES:
        job.run(programs.call, strategy=strategy)
    records = [
        [(op["seq"], op["strategy"]) for op in services.ops(node, job.name, job.opening)]
        for node in job.node_names
    ]
    # Of the small ops before, which went by the short lane, each node has recorded some.
    recorded = [record[-len(STRATEGIES) :] for record in records]
    assert all(record == recorded[0] for record in recorded)
    latest = [strategy for _, strategy in recorded[0]]
    asked, chosen = [*STRATEGIES[:-1]], latest.pop()
    assert latest == ["tree(2)" if name == "tree" else name for name in asked]
    assert chosen not in ("", "auto")


def test_nothing_is_kept_of_the_hundreds_of_ops_of_a_registration(
    job: Job, services: Services
) -> None:
    job.run(programs.calls, count=300)
    assert job.run(programs.bookkeeping) == [{"in_flight": 0, "pending": 0}] * job.world_size
    for node in job.node_names:
        assert services.group_status(node, job.name)["in_flight"] == []


@pytest.mark.parametrize("op", one_in(3, OPS))
def test_one_rank_alone_gets_back_what_it_gave(pool: RankPool, op: str) -> None:
    with pool.job([0]) as alone:
        bits = np.array([0.1, -0.0, 3e-45, np.inf, 65504.0], np.float32)
        for dtype in ("float32", "bfloat16", "float16"):
            values = [_round_trip(bits, dtype).tolist()]
            (folded,) = alone.run(
                exact.fold, values=values, strategies=STRATEGIES, dtype=dtype, op=op
            )
            assert set(folded) == {encode(np.array(values[0]), dtype).hex()}, dtype


# References


def _wild(world_size: int) -> list[Floats]:
    """Per rank, numbers of such different sizes that every order of adding them shows."""
    generator = np.random.default_rng(12)
    signs = generator.choice([-1, 1], (world_size, 200))
    values = signs * generator.uniform(1, 2, (world_size, 200))
    return list((values * 2.0 ** generator.integers(-3, 9, (world_size, 200))).astype(np.float32))


def _per_node(values: Sequence[Floats], job: Job) -> list[Floats]:
    """The fold of each node's ranks, in rank order; the nodes in ring order, which is by name."""
    return [
        reduce(np.add, [row for row, place in zip(values, job.nodes, strict=True) if place == node])
        for node in job.node_names
    ]


def _in_node_order(values: Sequence[Floats], job: Job) -> Floats:
    return reduce(np.add, _per_node(values, job))


def _reference(values: Sequence[Sequence[float]], op: str) -> npt.NDArray[np.float64]:
    given = np.array(values, np.float64)
    folds: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "product": np.prod}
    folded: npt.NDArray[np.float64] = folds[op](given, 0)
    return folded


def _round_trip(values: Floats, dtype: str) -> Floats:
    data = encode(values, dtype)
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def _fold(
    job: Job, values: Sequence[Any], strategy: str, dtype: str = "float32", op: str = "sum"
) -> bytes:
    """The bytes that one op gives, which must be the same on all ranks."""
    rows = [list(map(float, row)) for row in values]
    got = job.run(exact.fold, values=rows, strategies=[strategy], dtype=dtype, op=op)
    assert all(rank == got[0] for rank in got)
    return bytes.fromhex(got[0][0])
