"""The agent's fold kernel alone: as many inputs and outputs as an all-reduce of ranks has.

What an all-reduce takes longer than this is not the kernel's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import torch

from allfold_agent.gpu import kernels
from allfold_agent.gpu.device import Device, find
from allfold_agent.gpu.kernels import THREADS, Variant
from allfold_agent.watch import Watch
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp
from benchmarks.gpu.devices import Stopwatch, stream_of
from benchmarks.gpu.plan import GRIDS, fold_bytes

DTYPES = ("float32", "bfloat16")
# Sums in place grow by the number of ranks each time, and stay exact as long as this fits.
_MOST_ROUNDS = 20
_LARGEST = 15
_POISON = -77.0
_CHUNK = 1 << 26


def measure(ordinal: int, size: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Every dtype, in place and from one memory to another, on every grid.

    Args:
        size: bytes of each tensor.

    Returns:
        For each: ``dtype``, ``in_place``, ``grid`` (0: the agent's own), ``seconds`` (median),
        ``least``, ``rate`` in bytes per second and ``wrong`` elements.
    """
    watch = Watch("benchmark")
    try:
        with torch.cuda.device(ordinal):
            bench = _Bench(Device(find()[ordinal], watch), size, ranks, min(rounds, _MOST_ROUNDS))
            cases = product(DTYPES, (False, True))
            return [row for dtype, in_place in cases for row in bench.rows(dtype, in_place)]
    finally:
        watch.close()


class _Bench:
    def __init__(self, device: Device, size: int, ranks: int, rounds: int) -> None:
        self._device = device
        self._size = size
        self._ranks = ranks
        self._rounds = rounds
        self._stream = stream_of(device.stream, device.ordinal)

    def rows(self, dtype: str, in_place: bool) -> list[dict[str, Any]]:
        kind = DType.from_label(dtype)
        variant = Variant(kind, DType.FLOAT32, kind, ReduceOp.SUM, self._ranks)
        inputs = [self._tensor(dtype) for _ in range(self._ranks)]
        outputs = inputs if in_place else [torch.empty_like(each) for each in inputs]
        return [self._row(variant, grid, inputs, outputs) for grid in GRIDS]

    def _row(
        self,
        variant: Variant,
        grid: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        in_place = outputs is inputs
        _fill(inputs)
        total = sum(each.float() for each in inputs[1:]) + inputs[0].float()
        if not in_place:
            for tensor in outputs:
                tensor.fill_(_POISON)
        torch.cuda.synchronize()
        laps = self._laps(variant, grid, inputs, outputs)
        growth = float(self._ranks) ** (Stopwatch.pieces(self._rounds) - 1) if in_place else 1.0
        wrong = sum(_count_wrong(tensor, total, growth) for tensor in outputs)
        seconds = statistics.median(laps)
        return {
            "dtype": variant.given.label,
            "in_place": in_place,
            "grid": grid,
            "seconds": seconds,
            "least": min(laps),
            "rate": fold_bytes(self._size, self._ranks) / seconds,
            "wrong": wrong,
        }

    def _laps(
        self,
        variant: Variant,
        grid: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> list[float]:
        sources = [each.data_ptr() for each in inputs]
        targets = [each.data_ptr() for each in outputs]
        watch, numel = Stopwatch(self._stream), inputs[0].numel()
        with self._device.current(), _blocks_per_multiprocessor(grid):
            # Compiled, and known to the GPU, before anything is timed: on no elements.
            self._device.launch(variant, sources, targets, 0, 1.0, 1.0)
            watch.lap()
            for _ in range(Stopwatch.pieces(self._rounds)):
                self._device.launch(variant, sources, targets, numel, 1.0, 1.0)
                watch.lap()
        return watch.seconds()

    def _tensor(self, dtype: str) -> torch.Tensor:
        count = self._size // DType.from_label(dtype).itemsize
        device = f"cuda:{self._device.ordinal}"
        return torch.empty(count, dtype=getattr(torch, dtype), device=device)


def _fill(tensors: Sequence[torch.Tensor]) -> None:
    """Whole numbers, different for each rank, that both types add up exactly."""
    for rank, tensor in enumerate(tensors):
        dice = torch.Generator(tensor.device).manual_seed(rank)
        tensor.random_(-_LARGEST, _LARGEST + 1, generator=dice)


def _count_wrong(tensor: torch.Tensor, total: torch.Tensor, growth: float) -> int:
    ranges = [slice(start, start + _CHUNK) for start in range(0, len(tensor), _CHUNK)]
    return sum(int((tensor[each].float() != total[each] * growth).sum()) for each in ranges)


@contextmanager
def _blocks_per_multiprocessor(wanted: int) -> Iterator[None]:
    """While entered, kernels are launched on such a grid; 0 leaves it to the agent."""

    def grid(numel: int, variant: Variant, multiprocessors: int) -> tuple[int, int]:
        needed = -(-numel // (variant.width * THREADS))
        return max(1, min(needed, multiprocessors * wanted)), THREADS

    with mock.patch.object(kernels, "grid", grid) if wanted else nullcontext():
        yield
