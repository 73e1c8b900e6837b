"""Programs of the ranks that the page shows: a training whose ranks can be held back."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import allfold

SECONDS = 100.0


def round_(group: allfold.Group, *, value: float, quorum: int) -> float:
    """A weighted mean of 64 KiB: what it gives. A rank weighs its number + 1, with value 0 nothing.

    It does not wait long for more than a quorum.
    """
    tensor = np.full(1 << 14, value, np.float32)
    weight = group.rank + 1 if value else 0
    group.start_round(tensor, weight=weight, quorum=quorum, within=0.05).wait()
    return float(tensor[0])


def train(
    group: allfold.Group,
    *,
    folder: str,
    numel: int,
    pause: float = 0.0,
    slow: int = -1,
) -> int:
    """All-reduce until the file ``stop`` is there; return the number of ops.

    A rank calls nothing while there is a file ``hold-<its number>``. The rank ``slow`` needs longer
    than the others for itself.
    """
    deadline = time.monotonic() + SECONDS
    tensor = np.zeros(numel, np.float32)
    for count in range(1, 1 << 30):
        while (Path(folder) / f"hold-{group.rank}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(pause * (3 if group.rank == slow else 1))
        tensor[:] = 0
        # All stop after the same op: the one in which any of them has seen the file.
        tensor[0] = (Path(folder) / "stop").exists() or time.monotonic() > deadline
        group.all_reduce(tensor)
        if tensor[0]:
            return count
    raise AssertionError("never told to stop")
