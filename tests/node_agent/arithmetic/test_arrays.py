"""The folds of arrays have the bits of those of tensors."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array, array_fold
from allfold_agent.arithmetic.kernels import TORCH_DTYPES, Arithmetic
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp

REDUCTIONS = [
    pytest.param(op, dtype, id=f"{op.label} of {dtype.label}")
    for op, dtype in product(ReduceOp, DType)
    if op.refusal(dtype) is None
]


def numbers(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Numbers of any size; of floats also zeros of both signs, and infinities."""
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        found = (torch.randn(numel, generator=draw) * 100).to(dtype)
        signs = torch.randint(0, 2, (numel,), generator=draw) * 2.0 - 1
        zeros, infinities = torch.rand(2, numel, generator=draw) < 0.3
        found[zeros] = (signs * 0.0).to(dtype)[zeros]
        found[infinities] = (torch.abs(signs) * torch.inf).to(dtype)[infinities]
        return found
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=draw).to(dtype)
    about = torch.iinfo(dtype)
    return torch.randint(about.min, about.max, (numel,), generator=draw).to(dtype)


def as_array(tensor: torch.Tensor, dtype: DType) -> Array:
    bits = tensor.view(torch.int16) if dtype is DType.BFLOAT16 else tensor
    array: Array = bits.numpy().view(ARRAY_DTYPES[dtype])
    return array


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of numbers; one NaN is as good as another."""
    return torch.where(tensor == tensor, tensor, 0).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_a_fold_of_arrays_has_the_bits_of_that_of_tensors(
    op: ReduceOp, dtype: DType, count: int
) -> None:
    arithmetic = Arithmetic(Fingerprint(Kind.ALL_REDUCE, op, dtype, (1,), -1, AUTO, factor=0.5), 4)
    fold, kept = array_fold(arithmetic), arithmetic.kept_type
    for numel in (1, 7, 16, 33, 1000):
        given = [numbers(TORCH_DTYPES[kept], numel, seed) for seed in range(count)]
        right = given[0].clone()
        arithmetic.fold(right, [each.clone() for each in given])
        for at in range(count):  # the result may go to where an operand is
            operands = [each.clone() for each in given]
            with np.errstate(all="ignore"):  # as in the thread that folds
                fold.fold(as_array(operands[at], kept), [as_array(each, kept) for each in operands])
            assert bits(operands[at]) == bits(right), (numel, at)
