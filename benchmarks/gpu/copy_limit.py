"""How fast the card copies within its own memory: no all-reduce on it can be faster."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.gpu.devices import Stopwatch
from benchmarks.gpu.plan import copy_bytes


def measure(ordinal: int, size: int, rounds: int) -> dict[str, Any]:
    """A plain copy from one tensor to another, timed by CUDA events.

    Args:
        size: bytes of each tensor.

    Returns:
        ``seconds`` (median), ``least``, ``rate`` in bytes per second, read and written, and
        ``wrong`` elements.
    """
    device = f"cuda:{ordinal}"
    with torch.cuda.device(ordinal):
        source = torch.randint(-(2**31), 2**31, (size // 4,), dtype=torch.int32, device=device)
        target = torch.full_like(source, -1)
        watch = Stopwatch()
        watch.lap()
        for _ in range(Stopwatch.pieces(rounds)):
            target.copy_(source)
            watch.lap()
        laps = watch.seconds()
        wrong = int((target != source).sum())
    seconds = statistics.median(laps)
    rate = copy_bytes(size) / seconds
    return {"size": size, "seconds": seconds, "least": min(laps), "rate": rate, "wrong": wrong}
