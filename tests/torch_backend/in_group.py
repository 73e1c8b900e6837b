"""Programs of workers that run inside a torch group: what is common to them."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

import allfold.torch  # noqa: F401

faulthandler.enable()

TIMEOUT = timedelta(seconds=20)
_kept: list[dist.ProcessGroup] = []


def in_group(program: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``program(rank, world_size, ...)`` in a fresh default group of the backend."""

    @wraps(program)
    def run(
        rank: int, world_size: int, agent: str, store: str, backend: str = "allfold", **more: Any
    ) -> Any:
        os.environ["ALLFOLD_SOCKET"] = agent
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        try:
            return program(rank, world_size, **more)
        finally:
            _keep_gloo()
            dist.destroy_process_group()

    return run


def _keep_gloo() -> None:
    """Keep Gloo's groups until the process ends, so that no destructor runs now (torch 2.13).

    It waits for Gloo's threads with the GIL held, and one of them may still need the GIL to let go
    of the tensors of its last op.
    """
    groups = dist.distributed_c10d._world.pg_map
    _kept.extend(each for each in groups if dist.get_backend(each) == dist.Backend.GLOO)


def world() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def check(got: Any, expected: Any) -> None:
    """Equal in every element, and of one dtype."""
    if isinstance(got, list | tuple):
        assert len(got) == len(expected), (got, expected)
        for one, other in zip(got, expected, strict=True):
            check(one, other)
        return
    expected = torch.as_tensor(expected, dtype=got.dtype)
    assert torch.equal(got, expected), (got, expected)


def total(world_size: int) -> int:
    """1 + 2 + ... + world_size: what a sum gives where every rank brings its rank + 1."""
    return world_size * (world_size + 1) // 2
