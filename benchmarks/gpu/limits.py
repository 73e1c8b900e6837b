"""The limits of a GPU: a copy within its memory, and the agent's fold kernel alone.

No all-reduce of ranks that share the GPU can be faster than a copy of as many bytes; what one takes
longer than the kernel is not the kernel's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch

from allfold_agent.gpu.completions import FencePoller
from allfold_agent.gpu.device import GpuDevice, find
from allfold_agent.gpu.kernels import Variant
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp
from benchmarks.plan import MIB

_torch_cuda: Any = torch.cuda  # some of it has no types
_SIZE = 256 * MIB
_ROUNDS = 20
# Work is not yet queued up during the first pieces.
_WARM_UP = 3
# Sums of so few and so small numbers are exact in bfloat16 too.
_LARGEST = 15


def measure(ranks: int) -> list[dict[str, Any]]:
    """A copy, and folds of so many ranks' tensors of 256 MiB, in place and apart.

    Returns:
        For each: ``name``, ``seconds`` (median), ``rate`` in bytes per second, read and written,
        and ``wrong`` elements.
    """
    poller = FencePoller("benchmark")
    try:
        with torch.cuda.device(0):
            device = GpuDevice(find()[0], poller)
            rows = [_copy()]
            for dtype in ("float32", "bfloat16"):
                rows += _folds(device, dtype, ranks)
            return rows
    finally:
        poller.close()


def _copy() -> dict[str, Any]:
    source = torch.randint(-(2**31), 2**31, (_SIZE // 4,), dtype=torch.int32, device="cuda")
    target = torch.full_like(source, -1)
    seconds = _timed(torch.cuda.current_stream(), lambda: target.copy_(source))
    return _row("copy", seconds, 2 * _SIZE, int((target != source).sum()))


def _folds(device: GpuDevice, dtype: str, ranks: int) -> Iterator[dict[str, Any]]:
    kind = DType.from_label(dtype)
    variant = Variant(kind, DType.FLOAT32, kind, ReduceOp.SUM, ranks)
    inputs = [_numbers(dtype, rank) for rank in range(ranks)]
    total = sum(each.float() for each in inputs[1:]) + inputs[0].float()
    stream = _torch_cuda.ExternalStream(int(device.stream), device=device.ordinal)
    for in_place in (False, True):
        outputs = inputs if in_place else [torch.empty_like(each) for each in inputs]
        sources = [each.data_ptr() for each in inputs]
        targets = [each.data_ptr() for each in outputs]

        def fold(count: int, given: list[int] = sources, made: list[int] = targets) -> None:
            with device.current():
                device.launch(variant, given, made, count, 1.0, 1.0)

        fold(0)  # compiles it
        seconds = _timed(stream, lambda: fold(len(inputs[0])))
        # In place, each fold has multiplied the sums by the number of ranks.
        growth = float(ranks) ** (_ROUNDS + _WARM_UP - 1) if in_place else 1.0
        wrong = sum(int((each.float() != total * growth).sum()) for each in outputs)
        name = f"fold of {ranks} {dtype}, {'in place' if in_place else 'apart'}"
        yield _row(name, seconds, 2 * ranks * _SIZE, wrong)


def _numbers(dtype: str, rank: int) -> torch.Tensor:
    """Whole numbers, different for each rank."""
    element = getattr(torch, dtype)
    made = torch.empty(_SIZE // element.itemsize, dtype=element, device="cuda")
    dice = torch.Generator("cuda").manual_seed(rank)
    return made.random_(-_LARGEST, _LARGEST + 1, generator=dice)


def _timed(stream: Any, work: Callable[[], object]) -> list[float]:
    """Seconds of each piece of work of a stream, by events between them."""
    torch.cuda.synchronize()
    events = [_torch_cuda.Event(enable_timing=True) for _ in range(_ROUNDS + _WARM_UP + 1)]
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    events[-1].synchronize()
    return [one.elapsed_time(other) / 1e3 for one, other in pairwise(events)][_WARM_UP:]


def _row(name: str, seconds: list[float], nbytes: int, wrong: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {"name": name, "seconds": median, "rate": nbytes / median, "wrong": wrong}
