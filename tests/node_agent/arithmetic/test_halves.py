"""Half types: every element of them, every tie between two, and who converts them."""

from __future__ import annotations

import logging
import sys
from threading import get_ident

import numpy as np
import pytest
import torch

from allfold_agent.arithmetic import torch_kernels
from allfold_agent.arithmetic.halves import BLOCK, BFloat16, Float16, Half
from allfold_core.dtypes import DType
from tests.support.elements import TORCH_DTYPES, array_of
from tests.support.waiting import wait_until

DEADLINE = 20.0
FLOAT16_BY_TORCH = Float16()
FLOAT16_BY_TORCH._cast = torch_kernels.cast
HOW: list[tuple[DType, Half]] = [
    (DType.BFLOAT16, BFloat16()),
    (DType.FLOAT16, Float16()),
    (DType.FLOAT16, FLOAT16_BY_TORCH),
]
IDS = ["bfloat16", "float16", "float16 by torch"]


def all_of(dtype: DType) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(TORCH_DTYPES[dtype])


def widened(half: Half, halves: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(len(halves), dtype=torch.float32)
    half.widen(array_of(halves), array_of(wide))
    return wide


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell if all bits are, but for which NaN it is."""
    nans = one.isnan()
    kept = [torch.where(nans, 0.0, each.float()).view(torch.int32) for each in (one, other)]
    return torch.equal(nans, other.isnan()) and torch.equal(*kept)


@pytest.mark.parametrize(("dtype", "half"), HOW, ids=IDS)
def test_every_half_widens_to_itself_and_back(dtype: DType, half: Half) -> None:
    assert BLOCK == 1 << 16, "all of them at a time"
    halves = all_of(dtype)
    wide = widened(half, halves)
    assert same(wide, halves.float())
    again = torch.empty_like(halves)
    half.narrow(array_of(wide), array_of(again))
    assert same(again, halves)


@pytest.mark.parametrize(("dtype", "half"), HOW, ids=IDS)
def test_every_number_is_rounded_to_the_nearest_half_and_ties_to_even(
    dtype: DType, half: Half
) -> None:
    wide = widened(half, all_of(dtype))
    ties = (wide[1:].double() + wide[:-1].double()).div(2).float()
    near = [torch.nextafter(ties, torch.full_like(ties, to)) for to in (-torch.inf, torch.inf)]
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([65519.99, 65520.0, 3.4e38, 1e-45, -1e-45])
    for values in (wide, ties, *near, nans, ends):
        rounded = torch.empty(len(values), dtype=TORCH_DTYPES[dtype])
        with np.errstate(all="ignore"):  # as in the threads that fold
            half.round(array_of(values), array_of(rounded))
        assert same(rounded, values.to(rounded.dtype))


def test_torch_converts_float16_once_a_thread_of_its_own_has_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaders = []
    real = Float16._load

    def load(half: Float16) -> None:
        loaders.append(get_ident())
        real(half)

    monkeypatch.setattr(Float16, "_load", load)
    half = Float16()
    before = half._cast
    halves = all_of(DType.FLOAT16)
    widened(half, halves[:1000])
    assert not loaders, "for so few NumPy is as fast"
    for _ in range(3):
        widened(half, halves)
    wait_until(lambda: half._cast is torch_kernels.cast, "torch converts", DEADLINE)
    assert before is not torch_kernels.cast
    assert len(loaders) == 1
    assert get_ident() not in loaders


def test_where_there_is_no_torch_numpy_goes_on_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("allfold_agent.arithmetic.torch_kernels")
    monkeypatch.setitem(sys.modules, "allfold_agent.arithmetic.torch_kernels", None)
    half = Float16()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            widened(half, all_of(DType.FLOAT16))
        wait_until(lambda: len(caplog.records) > 0, "the log says so", DEADLINE)
    assert [each.message.split(":")[0] for each in caplog.records] == [
        "float16 is converted slowly, as torch cannot be loaded"
    ]
    halves = all_of(DType.FLOAT16)
    assert same(widened(half, halves), halves.float())
