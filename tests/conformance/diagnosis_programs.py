"""Programs of ranks that others wait for."""

from __future__ import annotations

import time

import numpy as np

import allfold
from tests.support.processes import rank_worker


def train(group: allfold.Group, seconds: float, compute_seconds: float) -> int:
    """All-reduce for some seconds, and compute in between; return the number of ops."""
    ops, until, go_on = 0, time.monotonic() + seconds, True
    while go_on:
        time.sleep(compute_seconds)
        go_on = bool(group.all_reduce(np.array([time.monotonic() < until], np.float32))[0])
        ops += 1
    return ops


def load_batch(group: allfold.Group, seconds: float) -> list[float]:
    """Keep the others waiting, then do what they do."""
    time.sleep(seconds)
    return all_reduce(group)


def call_and_leave(
    group: allfold.Group, numel: int = 4, timeout: float | None = None
) -> list[float]:
    """One all-reduce, and the end of the group for this rank, whatever comes of it."""
    try:
        return [
            float(each) for each in group.all_reduce(np.ones(numel, np.float32), timeout=timeout)
        ]
    finally:
        rank_worker.close_group(group.name)


def all_reduce(group: allfold.Group, timeout: float | None = None) -> list[float]:
    """One all-reduce."""
    return [float(each) for each in group.all_reduce(np.ones(4, np.float32), timeout=timeout)]


def receive(group: allfold.Group, source: int, timeout: float) -> None:
    """Wait for a message."""
    group.recv(np.zeros(4, np.float32), source, timeout=timeout)
