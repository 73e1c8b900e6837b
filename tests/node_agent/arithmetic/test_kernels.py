"""The arithmetic against NumPy, and its promises about order and rounding."""

from __future__ import annotations

import pytest
import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp


def arithmetic(dtype: DType, op: ReduceOp, world_size: int = 3) -> Arithmetic:
    return Arithmetic(Fingerprint(Kind.ALL_REDUCE, op, dtype, (4,), -1, "auto"), world_size)


def fold(dtype: DType, op: ReduceOp, *rows: list[float]) -> torch.Tensor:
    how = arithmetic(dtype, op, len(rows))
    inputs = [torch.tensor(row, dtype=how.dtype) for row in rows]
    kept = torch.empty(len(rows[0]), dtype=how.kept_dtype)
    how.fold(kept, inputs)
    result = torch.empty(len(rows[0]), dtype=how.dtype)
    how.finish([result], kept)
    return result


@pytest.mark.parametrize("dtype", [each for each in DType if each is not DType.BOOL])
@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [6, 3, 3]),
        (ReduceOp.PRODUCT, [6, 0, 1]),
        (ReduceOp.MIN, [1, 0, 1]),
        (ReduceOp.MAX, [3, 2, 1]),
    ],
)
def test_every_dtype_folds_as_integers_do(dtype: DType, op: ReduceOp, expected: list[int]) -> None:
    assert fold(dtype, op, [1, 0, 1], [2, 2, 1], [3, 1, 1]).tolist() == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [True, True, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PRODUCT, [True, False, False]),
        (ReduceOp.MIN, [True, False, False]),
    ],
)
def test_booleans_fold_to_any_or_all(op: ReduceOp, expected: list[bool]) -> None:
    assert fold(DType.BOOL, op, [1, 1, 0], [1, 0, 0]).tolist() == expected


def test_integers_wrap_around() -> None:
    assert fold(DType.INT8, ReduceOp.SUM, [100], [100]).tolist() == [-56]


def test_half_types_are_rounded_once_at_the_end() -> None:
    # 256 + 1 rounds to 256 in bfloat16, so rounding at every step would lose both ones.
    assert fold(DType.BFLOAT16, ReduceOp.SUM, [256], [1], [1]).tolist() == [258]
    # 60000 + 60000 overflows float16, the mean does not.
    assert fold(DType.FLOAT16, ReduceOp.MEAN, [60000], [60000]).tolist() == [60000]


def test_a_sum_that_does_not_fit_a_half_type_is_infinite() -> None:
    assert fold(DType.FLOAT16, ReduceOp.SUM, [60000], [60000]).tolist() == [float("inf")]


def test_a_mean_divides_once_after_the_sum() -> None:
    third = torch.tensor([2.0], dtype=torch.float32) / 3
    assert fold(DType.FLOAT32, ReduceOp.MEAN, [1], [1], [0]).equal(third)


def test_nan_and_infinity_propagate() -> None:
    nan, inf = float("nan"), float("inf")
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN, ReduceOp.PRODUCT):
        assert fold(DType.FLOAT32, op, [1], [nan], [2]).isnan().all(), op
    assert fold(DType.FLOAT32, ReduceOp.SUM, [1], [inf]).tolist() == [inf]


@pytest.mark.parametrize("own", range(4))
def test_the_output_may_be_the_memory_of_any_operand(own: int) -> None:
    how = arithmetic(DType.FLOAT32, ReduceOp.SUM)
    big, small = 2.0**30, 1.0
    operands = [torch.tensor([value]) for value in (big, small, -big, small)]
    expected = ((operands[0] + operands[1]) + operands[2]) + operands[3]
    how.fold(operands[own], operands)
    assert operands[own].equal(expected), "the fold order depends on where the output lies"
