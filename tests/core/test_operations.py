"""Kinds and reductions: what each is, and for which types."""

from __future__ import annotations

import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import Kind, ReduceOp

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
HALVES = (DType.FLOAT16, DType.BFLOAT16)
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
REAL = (ReduceOp.MEAN, ReduceOp.PREMUL_SUM, ReduceOp.WEIGHTED_MEAN)


def test_kinds_know_whether_they_reduce_and_have_a_root() -> None:
    assert [kind for kind in Kind if kind.reduces] == [
        Kind.ALL_REDUCE,
        Kind.REDUCE,
        Kind.REDUCE_SCATTER,
    ]
    assert [kind for kind in Kind if kind.has_root] == [
        Kind.REDUCE,
        Kind.BROADCAST,
        Kind.GATHER,
        Kind.SCATTER,
    ]


def test_kinds_know_whether_they_are_about_blocks() -> None:
    assert [kind for kind in Kind if not kind.has_blocks] == [
        Kind.ALL_REDUCE,
        Kind.REDUCE,
        Kind.BROADCAST,
        Kind.BARRIER,
    ]


def test_half_types_are_summed_in_float32_and_compared_as_they_are() -> None:
    for dtype in DType:
        for op in ReduceOp:
            rounds = op not in (ReduceOp.MIN, ReduceOp.MAX, *BITWISE)
            expected = DType.FLOAT32 if dtype in HALVES and rounds else dtype
            assert op.accumulation_dtype(dtype) is expected
        assert dtype.is_half == (dtype in HALVES)


def test_what_would_round_is_refused_for_integers_and_what_is_bitwise_for_floats() -> None:
    for dtype in DType:
        assert dtype.is_float == (dtype in FLOATS)
        for op in ReduceOp:
            refused = op in BITWISE if dtype in FLOATS else op in REAL
            assert bool(op.refusal(dtype)) == refused, (op, dtype)


@pytest.mark.parametrize(
    ("op", "dtype", "reason"),
    [
        (ReduceOp.MEAN, DType.INT32, "mean of int32 is not defined: an integer mean would have"),
        (ReduceOp.MEAN, DType.BOOL, "mean of bool is not defined"),
        (ReduceOp.PREMUL_SUM, DType.UINT8, "premul_sum of uint8 is not defined: its factor is a"),
        (ReduceOp.BAND, DType.FLOAT32, "band of float32 is not defined: it is for integers and"),
        (ReduceOp.BOR, DType.BFLOAT16, "bor of bfloat16 is not defined"),
        (ReduceOp.BXOR, DType.FLOAT64, "bxor of float64 is not defined"),
    ],
)
def test_a_refusal_says_why(op: ReduceOp, dtype: DType, reason: str) -> None:
    assert (op.refusal(dtype) or "").startswith(reason)
