"""Programs of ranks: memory."""

from __future__ import annotations

import gc
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
        close_group(group.name)
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("allfold-arena" in line for line in maps)
    finally:
        gc.enable()


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
