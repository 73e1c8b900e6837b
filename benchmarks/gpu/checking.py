"""Calls of every collective, each compared with what NumPy computes. A rank's side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import allfold
from benchmarks.gpu import reference
from benchmarks.gpu.devices import Device
from benchmarks.gpu.plan import ARENA, CPU, PLAIN, Call
from benchmarks.gpu.reference import FACTOR, Array

_POISON = 0x5A


class Tensor:
    """A tensor of a call, in memory that is poisoned before; what is around it must stay so.

    Attributes:
        given: what the collective is given.
    """

    def __init__(
        self, memory: str, count: int, dtype: str, group: allfold.Group, device: Device
    ) -> None:
        """Args:
        memory: as in :class:`benchmarks.gpu.plan.Call`.
        """
        self._step = 2 if memory == "strided" else 1
        self._lead = 1 if memory == "offset" else 0
        self._count = count
        total = self._lead + count * self._step + self._lead
        element = getattr(torch, dtype)
        if memory == "array":
            self.given: Any = group.empty(total, dtype, device=device.name)
            self._base = torch.as_tensor(self.given, device=device.name)
        elif memory in (ARENA, "offset"):
            self._base = group.empty(total, element, device=device.name)
        else:
            self._base = torch.empty(total, dtype=element, device=device.name)
        self._view = self._base[self._lead : total - self._lead : self._step]
        if memory != "array":
            self.given = self._view
        self._bytes().fill_(_POISON)

    def staged(self, numbers: Array) -> torch.Tensor:
        """What a rank brings, where the tensor is, so that filling it waits for nothing."""
        return torch.from_numpy(numbers).to(self._view.dtype).to(self._view.device)

    def fill(self, staged: torch.Tensor) -> None:
        """Write it, on the current stream."""
        self._view.copy_(staged)

    def count_wrong(self, numbers: Array | None) -> int:
        """Elements that are not these, and those around it that were overwritten.

        Without numbers, nothing of it may have been written.
        """
        raw = self._bytes().reshape(len(self._base), self._base.element_size()).cpu().numpy()
        around = np.ones(len(self._base), bool)
        if numbers is not None:
            stop = self._lead + self._count * self._step
            around[self._lead : stop : self._step] = False
        wrong = int(np.count_nonzero((raw[around] != _POISON).any(axis=1)))
        if numbers is None:
            return wrong
        return wrong + int(np.count_nonzero(~(self._numbers() == numbers)))

    def _numbers(self) -> Array:
        """The elements, of a type that NumPy has."""
        view = self._view
        if view.dtype is torch.bool:  # a byte of poison is no bool, and must not pass for one
            view = self._bytes().as_strided(view.shape, view.stride(), view.storage_offset())
        ours = view.cpu()
        is_half = ours.dtype in (torch.bfloat16, torch.float16)
        found: Array = (ours.float() if is_half else ours).numpy()
        return found

    def _bytes(self) -> torch.Tensor:
        return self._base.view(torch.uint8)


class Checker:
    """Does calls of one group."""

    def __init__(self, group: allfold.Group, device: Device, path: str) -> None:
        """Args:
        path: that of the rank's tensors; ``"cpu"`` if they are on the host.
        """
        self._group = group
        self._device = device
        # Without memory that the agent has open there are no arrays of the arena.
        self._has_arrays = path in ("ipc", CPU)

    def count_wrong(self, call: Call) -> int:
        """Elements that are wrong on this rank after a call. Every rank calls together.

        Nothing waits for the GPU between a call and what is before and after it.
        """
        group = self._group
        numbers = reference.given(call, group.rank, group.world_size)
        expected = reference.expected(call, group.rank, group.world_size)
        source = target = self._tensor(call, len(numbers))
        if call.kind in _OUT_OF_PLACE:
            target = self._tensor(call, 0 if expected is None else len(expected))
        staged = source.staged(numbers)
        if call.late:
            self._device.synchronize()
            self._device.be_late()
        source.fill(staged)
        work = _CALLS[call.kind](group, call, source.given, target.given)
        if call.late:
            work.wait()
        wrong = target.count_wrong(expected)
        return wrong if target is source else wrong + source.count_wrong(numbers)

    def _tensor(self, call: Call, count: int) -> Tensor:
        memory = call.memory
        if memory == "array" and not self._has_arrays:
            memory = PLAIN
        return Tensor(memory, count, call.dtype, self._group, self._device)


def _all_reduce(group: allfold.Group, call: Call, x: Any, _: Any) -> Any:
    factor = FACTOR if call.op == "premul_sum" else None
    return group.all_reduce(x, call.op, factor=factor, async_op=call.late)


def _reduce(group: allfold.Group, call: Call, x: Any, _: Any) -> Any:
    return group.reduce(x, call.root, call.op, async_op=call.late)


def _broadcast(group: allfold.Group, call: Call, x: Any, _: Any) -> Any:
    return group.broadcast(x, call.root, async_op=call.late)


def _all_gather(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    return group.all_gather(x, y, counts=_counts(call), async_op=call.late)


def _gather(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    output = y if group.rank == call.root else None
    return group.gather(x, call.root, output, counts=_counts(call), async_op=call.late)


def _scatter(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    inputs = x if group.rank == call.root else None
    return group.scatter(y, inputs, call.root, counts=_counts(call), async_op=call.late)


def _reduce_scatter(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    return group.reduce_scatter(x, y, call.op, counts=_counts(call), async_op=call.late)


def _all_to_all(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    counts: dict[str, Any] = {}
    if not call.is_even:
        rank, world = group.rank, group.world_size
        counts["send_counts"] = reference.sends(call, rank, world)
        counts["receive_counts"] = reference.receives(call, rank, world)
    return group.all_to_all(x, y, async_op=call.late, **counts)


def _send_recv(group: allfold.Group, call: Call, x: Any, y: Any) -> Any:
    """Everybody sends to the next rank; the receive, if that is to be waited for later."""
    rank, world = group.rank, group.world_size
    sending = group.send(x, (rank + 1) % world, async_op=True)
    receiving = group.recv(y, (rank - 1) % world, async_op=call.late)
    sending.wait()
    return receiving


def _counts(call: Call) -> tuple[int, ...] | None:
    return None if call.is_even else call.blocks


_CALLS: dict[str, Callable[[allfold.Group, Call, Any, Any], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
_OUT_OF_PLACE = _CALLS.keys() - {"all_reduce", "reduce", "broadcast"}
