"""Gloo, NCCL, UCX (by commux) and Allfold's backend, through ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from allfold.cli._bench.data import Bench
from benchmarks.devices import Device, Operation, Tensor
from benchmarks.libraries import Handle
from benchmarks.plan import BARRIER, BURST, DECODE, THROUGH_TORCH, UCX

# Of libraries in a group beside the default one, which is Gloo's.
_BACKENDS = {"nccl": "nccl", UCX: "ucx", THROUGH_TORCH: "allfold"}

_Group = Any
_Call = Callable[[torch.Tensor, torch.Tensor, _Group], object]

# Newer versions of torch warn at the older names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Of tensors on GPUs, Gloo takes these alone.
_GLOO_ON_GPUS = ("all_reduce", "broadcast", BARRIER, BURST)
# All that commux has.
_UCX = ("all_reduce", "reduce", "broadcast", "send_recv", BARRIER, BURST, DECODE)


class TorchLibrary:
    """A group of ``torch.distributed``, with ordinary tensors."""

    wire = "native"

    def __init__(self, name: str, group: _Group, device: Device) -> None:
        """Args:
        name: ``gloo``, ``nccl``, ``ucx`` or ``allfold-torch``.
        """
        self.name = name
        self._group = group
        self._device = device

    def supports(self, kind: str) -> bool:
        if self.name == UCX:
            return kind in _UCX
        return self.name != "gloo" or not self._device.is_gpu or kind in _GLOO_ON_GPUS

    def empty(self, _: int, /) -> Tensor | None:
        return None

    def operation(self, bench: Bench, source: Tensor, target: Tensor) -> Operation:
        x, y, group = _tensor(source), _tensor(target), self._group
        call = _CALLS[bench.kind]
        if bench.kind == "send_recv" and self.name == "nccl":
            call = _shift_at_once
        return lambda: call(x, y, group)

    def barrier(self) -> Operation:
        return lambda: dist.barrier(self._group)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        handle: Handle = dist.all_reduce(_tensor(tensor), group=self._group, async_op=True)
        return handle

    def close(self) -> None:
        if dist.is_initialized():  # by another library already
            dist.destroy_process_group()


class GlooOnHost(TorchLibrary):
    """Copy to page-locked memory, Gloo there, copy back: what a script does without NCCL."""

    def supports(self, kind: str) -> bool:
        return kind not in (BARRIER, BURST, DECODE)

    def operation(self, bench: Bench, source: Tensor, target: Tensor) -> Operation:
        x = _pinned(source)
        y = x if target is source else _pinned(target)
        call = super().operation(bench, x, y)

        def operate() -> None:
            x.copy_(source)
            call()
            target.copy_(y)

        return operate


def join(
    name: str, rank: int, world: int, store: str, seconds: float, device: Device
) -> TorchLibrary:
    """One of the libraries; the first one opens the default group, which is Gloo's.

    Args:
        store: path of the file in which the ranks find each other.
        seconds: how long an op may take.
    """
    timeout = timedelta(seconds=seconds)
    if not dist.is_initialized():
        shared = FileStore(store, world)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=timeout)
    if name == UCX:
        import_module("commux").register()
    if backend := _BACKENDS.get(name):
        return TorchLibrary(name, dist.new_group(backend=backend, timeout=timeout), device)
    return (GlooOnHost if name == "gloo_host" else TorchLibrary)(name, dist.group.WORLD, device)


def _tensor(memory: Tensor) -> torch.Tensor:
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _blocks(tensor: torch.Tensor, group: _Group) -> list[torch.Tensor] | None:
    """Those of the root, which the others need not name."""
    return list(tensor.chunk(dist.get_world_size(group))) if dist.get_rank(group) == 0 else None


def _shift(x: torch.Tensor, y: torch.Tensor, group: _Group) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sending = dist.isend(x, (rank + 1) % world, group)
    dist.recv(y, (rank - 1) % world, group)
    if sending is not None:
        sending.wait()


def _shift_at_once(x: torch.Tensor, y: torch.Tensor, group: _Group) -> None:
    """The same for a library whose send may wait for the receive."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % world, group),
        dist.P2POp(dist.irecv, y, (rank - 1) % world, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


_CALLS: dict[str, _Call] = {
    "all_reduce": lambda x, _, group: dist.all_reduce(x, group=group),
    "reduce": lambda x, _, group: dist.reduce(x, 0, group=group),
    "broadcast": lambda x, _, group: dist.broadcast(x, 0, group=group),
    "all_gather": lambda x, y, group: _all_gather(y, x, group=group),
    "reduce_scatter": lambda x, y, group: _reduce_scatter(y, x, group=group),
    "gather": lambda x, y, group: dist.gather(x, _blocks(y, group), dst=0, group=group),
    "scatter": lambda x, y, group: dist.scatter(y, _blocks(x, group), src=0, group=group),
    "all_to_all": lambda x, y, group: dist.all_to_all_single(y, x, group=group),
    "send_recv": _shift,
}
