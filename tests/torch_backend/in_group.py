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
            result = program(rank, world_size, **more)
            _settle_gloo()
            return result
        finally:
            dist.destroy_process_group()

    return run


def _settle_gloo() -> None:
    """Let the threads of Gloo's groups forget the tensors of their last ops.

    Gloo's destructor waits for its thread with the GIL held, and that thread needs the GIL to let
    go of a tensor. A barrier has no tensors, and all before it is forgotten.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == dist.Backend.GLOO:
            dist.barrier(group)


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
