"""Programs of ranks: memory."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support.processes.rank_worker import close_group


def collect_garbage() -> None:
    """Let go of what nobody can reach."""
    gc.collect()


def arenas_after_a_failure(group: allfold.Group, arena: bool, wait_twice: bool) -> int:
    """The mapped segments of a rank that leaves after an op that failed, before any collection."""
    gc.collect()
    gc.disable()
    try:
        _fail(group, arena, wait_twice)
        return _arenas_after_leaving(group)
    finally:
        gc.enable()


def arenas_after_the_loss_of_the_agent(group: allfold.Group, agent: int) -> int:
    """The mapped segments of a rank that has left after two calls to an agent that was killed."""
    gc.collect()
    gc.disable()
    try:
        _lose_the_agent(group, agent)
        return _arenas_after_leaving(group)
    finally:
        gc.enable()


def _lose_the_agent(group: allfold.Group, agent: int) -> None:
    tensor = group.empty(1000, "float32")
    os.kill(agent, signal.SIGKILL)
    for _ in range(2):
        _refused(lambda: group.all_reduce(tensor))


def _arenas_after_leaving(group: allfold.Group) -> int:
    close_group(group.name)
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("allfold-arena" in line for line in maps)


def _fail(group: allfold.Group, arena: bool, wait_twice: bool) -> None:
    """An op on which the ranks disagree."""
    numel = 100 + group.rank
    tensor: Any = group.empty(numel, "float32") if arena else np.empty(numel, np.float32)
    tensor.fill(1)
    if not wait_twice:
        _refused(lambda: group.all_reduce(tensor))
        return
    work = group.all_reduce(tensor, async_op=True)
    for _ in range(2):
        _refused(work.wait)


def _refused(call: Callable[[], object]) -> None:
    try:
        call()
    except AllfoldError:
        return
    raise AssertionError("the op has succeeded")
