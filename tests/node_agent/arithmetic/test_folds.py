"""The folds of agents have the bits of torch's, and of those of ranks that fold by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product

import numpy as np
import pytest
import torch

from allfold._lane.folding import fold_of
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from tests.support.elements import TORCH_DTYPES, array_of

REDUCTIONS = [
    pytest.param(op, dtype, id=f"{op.label} of {dtype.label}")
    for op, dtype in product(ReduceOp, DType)
    if op is not ReduceOp.WEIGHTED_MEAN and op.refusal(dtype) is None
]
# The last one is longer than what is converted of halves at a time.
NUMELS = (1, 7, 16, 33, 1000, 70_001)


def _least(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of equal ones the last."""
    return torch.where((one < other) | one.isnan(), one, other)


def _greatest(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where((one > other) | one.isnan(), one, other)


_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: _least,
    ReduceOp.MAX: _greatest,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def call(op: ReduceOp, dtype: DType) -> Fingerprint:
    factor = 0.3 if op is ReduceOp.PREMUL_SUM else 1.0
    return Fingerprint(Kind.ALL_REDUCE, op, dtype, (1,), -1, AUTO, factor=factor)


def numbers(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Numbers of any size; of floats also zeros of both signs, infinities, and a NaN."""
    draw = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        found = (torch.randn(numel, generator=draw) * 100).to(dtype)
        signs = torch.randint(0, 2, (numel,), generator=draw) * 2.0 - 1
        zeros, infinities = torch.rand(2, numel, generator=draw) < 0.3
        found[zeros] = (signs * 0.0).to(dtype)[zeros]
        found[infinities] = (torch.abs(signs) * torch.inf).to(dtype)[infinities]
        if numel > 7:
            found[seed] = torch.nan
        return found
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=draw).to(dtype)
    about = torch.iinfo(dtype)
    return torch.randint(about.min, about.max, (numel,), generator=draw).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The bits of numbers; one NaN is as good as another."""
    return torch.where(tensor == tensor, tensor, 0).view(torch.uint8).numpy().tobytes()


def kept_of_torch(how: Arithmetic, given: list[torch.Tensor]) -> torch.Tensor:
    assert how.reduce_op is not None
    wide = [each.to(TORCH_DTYPES[how.kept_type]) for each in given]
    if how.factor != 1.0:
        wide = [each * how.factor for each in wide]
    return reduce(_COMBINE[how.reduce_op], wide)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_what_ranks_bring_is_folded_with_the_bits_of_torch(
    op: ReduceOp, dtype: DType, count: int
) -> None:
    print_ = call(op, dtype)
    how = Arithmetic(print_, count)
    for numel in NUMELS:
        given = [numbers(TORCH_DTYPES[dtype], numel, seed) for seed in range(count)]
        kept = torch.empty(numel, dtype=TORCH_DTYPES[how.kept_type])
        result, alone = (torch.empty(numel, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        right = kept_of_torch(how, given)
        with np.errstate(all="ignore"):  # as in the threads that fold
            how.fold_inputs(array_of(kept), list(map(array_of, given)))
            how.finish([array_of(result)], array_of(kept))
            if dtype is DType.BFLOAT16:
                stored = [array_of(each).view(np.uint16) for each in (*given, alone)]
            else:
                stored = list(map(array_of, (*given, alone)))
            fold_of(print_, count)(stored[:-1], stored[-1])
        assert bits(kept) == bits(right), numel
        divided = right / count if how.divisor else right
        assert bits(result) == bits(divided.to(result.dtype)), numel
        assert bits(alone) == bits(result), "ranks that fold by themselves have other bits"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_what_nodes_send_is_folded_with_the_bits_of_torch_to_any_operand(
    op: ReduceOp, dtype: DType, count: int
) -> None:
    how = Arithmetic(call(op, dtype), 4)
    how.factor = 1.0
    kept = TORCH_DTYPES[how.kept_type]
    for numel in NUMELS:
        given = [numbers(kept, numel, seed) for seed in range(count)]
        right = kept_of_torch(how, given)
        for at in range(count):
            operands = [each.clone() for each in given]
            with np.errstate(all="ignore"):
                how.fold(array_of(operands[at]), list(map(array_of, operands)))
            assert bits(operands[at]) == bits(right), (numel, at)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float])
def test_a_weighted_mean_multiplies_each_input_in_the_wider_type_and_divides_once(
    dtype: DType,
) -> None:
    how = Arithmetic(call(ReduceOp.WEIGHTED_MEAN, dtype), 3)
    factors, kept = [3.0, 0.3, 7.25], TORCH_DTYPES[how.kept_type]
    for numel in NUMELS:
        given = [numbers(TORCH_DTYPES[dtype], numel, seed) for seed in range(3)]
        folded, result = torch.empty(numel, dtype=kept), torch.empty_like(given[0])
        with np.errstate(all="ignore"):
            how.fold_inputs(array_of(folded), list(map(array_of, given)), factors)
            how.finish([array_of(result)], array_of(folded), 10.55)
        wide = [each.to(kept) * factor for each, factor in zip(given, factors, strict=True)]
        right = wide[0] + wide[1] + wide[2]
        assert bits(folded) == bits(right)
        assert bits(result) == bits((right / 10.55).to(result.dtype))
        how.fold_inputs(array_of(folded), [], [])
        assert not folded.any()
