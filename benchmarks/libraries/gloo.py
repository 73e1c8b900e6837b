"""Gloo, through ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from allfold.cli._bench_data import Array, Bench
from benchmarks.libraries import Handle, Operation

_Call = Callable[[torch.Tensor, torch.Tensor], object]

# Newer versions of torch warn at the older names.
_all_gather: _Call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: _Call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class GlooLibrary:
    """The default group of ``torch.distributed``, with ordinary tensors."""

    name = "gloo"
    wire = "native"

    def __init__(self, rank: int, world: int, store: str, seconds: float) -> None:
        """Join.

        Args:
            store: path of the file in which the ranks find each other.
            seconds: how long an op may take.
        """
        dist.init_process_group(
            "gloo",
            store=FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )

    def empty(self, _: int, /) -> Array | None:
        return None

    def operation(self, bench: Bench, source: Array, target: Array) -> Operation:
        x, y, call = torch.from_numpy(source), torch.from_numpy(target), _CALLS[bench.kind]
        return lambda: call(x, y)

    def barrier(self) -> Operation:
        return dist.barrier

    def start_all_reduce(self, tensor: Array) -> Handle:
        handle: Handle = dist.all_reduce(torch.from_numpy(tensor), async_op=True)
        return handle

    def close(self) -> None:
        dist.destroy_process_group()


def _gather(x: torch.Tensor, y: torch.Tensor) -> None:
    blocks = list(y.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    dist.gather(x, blocks, dst=0)


def _scatter(x: torch.Tensor, y: torch.Tensor) -> None:
    blocks = list(x.chunk(dist.get_world_size())) if dist.get_rank() == 0 else None
    dist.scatter(y, blocks, src=0)


def _shift(x: torch.Tensor, y: torch.Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(x, (rank + 1) % world)
    dist.recv(y, (rank - 1) % world)
    if sending is not None:
        sending.wait()


_CALLS: dict[str, _Call] = {
    "all_reduce": lambda x, _: dist.all_reduce(x),
    "reduce": lambda x, _: dist.reduce(x, 0),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
    "all_gather": lambda x, y: _all_gather(y, x),
    "reduce_scatter": lambda x, y: _reduce_scatter(y, x),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": lambda x, y: dist.all_to_all_single(y, x),
    "send_recv": _shift,
}
