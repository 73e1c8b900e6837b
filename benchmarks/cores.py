"""The cores of the nodes, where each node has one of its own: its agent and its ranks share it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def available() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin(pids: Sequence[int]) -> None:
    """Give each process a core of its own, with the threads that it has and those to come."""
    for pid, core in zip(pids, available(), strict=False):
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
