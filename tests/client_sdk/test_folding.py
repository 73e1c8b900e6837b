"""Ranks fold with the bits of torch, as agents do."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from allfold._elements import stored_as
from allfold._lane.folding import fold_of, rounded
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp

SIZE = 257
TORCH: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# A round never goes by the lane.
OPS = [op for op in ReduceOp if op is not ReduceOp.WEIGHTED_MEAN]
CASES = [(dtype, op) for dtype in DType for op in OPS if not op.refusal(dtype)]


def _print(op: ReduceOp, dtype: DType, shape: tuple[int, ...] = (SIZE,)) -> Fingerprint:
    factor = 0.3 if op is ReduceOp.PREMUL_SUM else 1.0
    return Fingerprint(Kind.ALL_REDUCE, op, dtype, shape, -1, AUTO, factor=factor)


def _of_torch(print_: Fingerprint, given: list[torch.Tensor]) -> torch.Tensor:
    op, dtype = print_.reduce_op, given[0].dtype
    assert op is not None
    kept = [each.to(getattr(torch, print_.kept_dtype.label)) for each in given]
    if op is ReduceOp.PREMUL_SUM:
        kept = [each * print_.factor for each in kept]
    folded = kept[0]
    for each in kept[1:]:
        folded = TORCH[op](folded, each)
    if op is ReduceOp.MEAN:
        folded = folded / len(given)
    return folded.to(dtype)


def _of_numpy(print_: Fingerprint, given: list[torch.Tensor]) -> torch.Tensor:
    stored = stored_as(print_.dtype)
    sources = [_as_numpy(each, stored) for each in given]
    out = np.zeros_like(sources[0])
    before = [each.copy() for each in sources]
    fold_of(print_, len(given))(sources, out)
    for source, was in zip(sources, before, strict=True):
        assert source.tobytes() == was.tobytes(), "the inputs stay as they are"
    return torch.frombuffer(bytearray(out.tobytes()), dtype=given[0].dtype).reshape(print_.shape)


def _as_numpy(tensor: torch.Tensor, stored: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes(tensor.view(torch.uint8).numpy()), stored).reshape(tensor.shape)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def _random(dtype: DType, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    if dtype.is_float:
        return (torch.randn(SIZE, generator=made) * 3).to(getattr(torch, dtype.label))
    high = 2 if dtype is DType.BOOL else 120
    return torch.randint(0, high, (SIZE,), generator=made).to(getattr(torch, dtype.label))


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda each: each.label)
def test_a_fold_has_the_bits_of_the_agents(dtype: DType, op: ReduceOp, world_size: int) -> None:
    print_ = _print(op, dtype)
    for seed in range(3):
        given = [_random(dtype, 10 * seed + rank) for rank in range(world_size)]
        assert _bits(_of_numpy(print_, given)) == _bits(_of_torch(print_, given))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", [each for each in DType if each.is_float], ids=lambda d: d.label)
def test_what_is_no_number_or_infinite_stays_so(dtype: DType, op: ReduceOp) -> None:
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    other = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    given = [each.to(getattr(torch, dtype.label)) for each in (special, other)]
    print_ = _print(op, dtype, (4,))
    got, expected = _of_numpy(print_, given), _of_torch(print_, given)
    assert torch.equal(got.isnan(), expected.isnan())
    assert _bits(got[~got.isnan()]) == _bits(expected[~expected.isnan()])


@pytest.mark.parametrize("dtype", [each for each in DType if each.is_float], ids=lambda d: d.label)
def test_a_sum_that_overflows_has_its_value_where_numpy_is_told_to_raise(dtype: DType) -> None:
    """Another rank of the op may not have told its NumPy so: both have the same outcome."""
    kind = getattr(torch, dtype.label)
    largest = torch.full((4,), torch.finfo(kind).max, dtype=kind)
    print_ = _print(ReduceOp.SUM, dtype, (4,))
    with np.errstate(all="raise"):
        raising = _of_numpy(print_, [largest] * 3)
    warning = _of_numpy(print_, [largest] * 3)  # warnings are errors here
    assert _bits(raising) == _bits(warning) == _bits(_of_torch(print_, [largest] * 3))


def test_every_float32_that_is_halfway_is_rounded_to_the_even_bfloat16() -> None:
    """All upper halves of float32 with the lower half at, below and above the middle."""
    halves = torch.arange(0, 0x7F80, dtype=torch.int32)
    for low in (0x7FFF, 0x8000, 0x8001):
        values = (halves * 65536 + low).view(torch.float32)
        assert rounded(values.numpy()).tobytes() == _bits(values.to(torch.bfloat16))


def test_minus_zero_keeps_its_sign_where_all_have_it() -> None:
    given = [torch.tensor([-0.0]), torch.tensor([-0.0])]
    print_ = _print(ReduceOp.SUM, DType.FLOAT32, (1,))
    assert _bits(_of_numpy(print_, given)) == _bits(torch.tensor([-0.0]))


def test_tensors_of_several_dimensions_are_folded_as_they_are() -> None:
    shape = (3, 4, 5)
    given = [torch.rand(shape).to(torch.bfloat16) for _ in range(3)]
    print_ = _print(ReduceOp.MEAN, DType.BFLOAT16, shape)
    assert prod(shape) == 60
    assert _bits(_of_numpy(print_, given)) == _bits(_of_torch(print_, given))
