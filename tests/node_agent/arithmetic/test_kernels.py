"""The arithmetic: its promises about order and rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from tests.support.elements import TORCH_DTYPES, array_of

FLOATS = [dtype for dtype in DType if dtype.is_float]


def arithmetic(dtype: DType, op: ReduceOp, world_size: int = 3) -> Arithmetic:
    return Arithmetic(Fingerprint(Kind.ALL_REDUCE, op, dtype, (4,), -1, "auto"), world_size)


def fold(dtype: DType, op: ReduceOp, *rows: list[float]) -> torch.Tensor:
    how = arithmetic(dtype, op, len(rows))
    inputs = [torch.tensor(row, dtype=TORCH_DTYPES[dtype]) for row in rows]
    kept = torch.empty(len(rows[0]), dtype=TORCH_DTYPES[how.kept_type])
    result = torch.empty(len(rows[0]), dtype=TORCH_DTYPES[dtype])
    with np.errstate(all="ignore"):  # as in the threads that fold
        how.fold_inputs(array_of(kept), list(map(array_of, inputs)))
        how.finish([array_of(result)], array_of(kept))
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


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
def test_nan_and_infinity_propagate(dtype: DType) -> None:
    nan, inf = float("nan"), float("inf")
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN, ReduceOp.PRODUCT):
        for rows in ([1], [nan], [2]), ([nan], [1], [2]), ([1], [2], [nan]):
            assert fold(dtype, op, *rows).isnan().all(), op
    assert fold(dtype, ReduceOp.SUM, [1], [inf]).tolist() == [inf]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_of_equal_zeros_the_last_one_wins_wherever_they_lie(dtype: DType, op: ReduceOp) -> None:
    """So it does not matter in what pieces a tensor is folded."""
    for numel in (1, 3, 8, 17, 1000, 70_000):
        for signs in ((1, -1), (-1, 1), (1, -1, 1), (-1, 1, -1, 1)):
            found = fold(dtype, op, *([sign * 0.0] * numel for sign in signs))
            assert set(torch.signbit(found).tolist()) == {signs[-1] < 0}, (numel, signs)


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.label)
def test_the_output_may_be_the_memory_of_any_operand(own: int, dtype: DType) -> None:
    how = arithmetic(dtype, ReduceOp.SUM if dtype is DType.FLOAT32 else ReduceOp.MAX)
    big, small = 2.0**30, 1.0
    operands = [
        torch.full((70_000,), value, dtype=TORCH_DTYPES[dtype])
        for value in (big, small, -big, small)
    ]
    expected = 1.0 if dtype is DType.FLOAT32 else big
    arrays = list(map(array_of, operands))
    how.fold(arrays[own], arrays)
    assert set(operands[own].tolist()) == {expected}, "the order depends on where the output lies"


@pytest.mark.parametrize("own", range(3))
def test_a_product_with_a_factor_may_go_to_where_any_input_lies(own: int) -> None:
    print_ = Fingerprint(
        Kind.ALL_REDUCE, ReduceOp.PREMUL_SUM, DType.FLOAT64, (9,), -1, "auto", factor=0.5
    )
    inputs = [np.full(9, value) for value in (1.0, 2.0, 4.0)]
    Arithmetic(print_, 3).fold_inputs(inputs[own], inputs)
    assert set(inputs[own].tolist()) == {3.5}
