"""Programs of ranks that lose one of them, or an agent."""

from __future__ import annotations

from pathlib import Path

import torch

import allfold
from tests.gpu.devices import keep_busy, take

_MIB = 1 << 20


def all_reduce(
    group: allfold.Group,
    device: str,
    *,
    busy: float = 0.0,
    note: str = "",
    timeout: float | None = None,
    arena: bool = True,
    numel: int = 1 << 20,
) -> list[float]:
    """An op on a tensor of rank + 1, behind work of so many seconds; its first and last element.

    ``note`` is a file that there is once the call is made.
    """
    home = take(device, group.rank)
    made = group.empty(numel, torch.float32, device=home) if arena else None
    tensor = torch.empty(numel, device=home) if made is None else made
    tensor.fill_(group.rank + 1)
    if busy:
        keep_busy(home, busy)
    work = group.all_reduce(tensor, timeout=timeout, async_op=True)
    if note:
        Path(note).touch()
    work.wait()
    return [tensor[0].item(), tensor[-1].item()]


def share(group: allfold.Group, device: str, mib: int) -> None:
    """Have so much memory in the arena, and keep it for as long as this process lives."""
    home = take(device, group.rank)
    tensor = group.empty(mib * _MIB, torch.uint8, device=home)
    tensor.fill_(1)
    group.all_reduce(tensor[:1000])
    _kept.append(tensor)


_kept: list[torch.Tensor] = []


def free_mib() -> int:
    """Return the free memory of the first GPU in MiB."""
    return int(torch.cuda.mem_get_info(0)[0]) // _MIB


def for_ever(group: allfold.Group, device: str) -> None:
    """One op after the other, until one fails."""
    home = take(device, group.rank)
    tensors = [
        group.empty(1 << 22, torch.float32, device=home).fill_(1.0),
        torch.ones(1 << 22, device=home),
    ]
    while True:
        for tensor in tensors:
            group.all_reduce(tensor, "max")
