"""Move tensors of others to the arena, where collectives need not copy them.

DDP allocates its buckets itself and keeps them, with views of them, for as long as it trains. torch
can exchange the memory of a storage under all of its views, so such a bucket is copied once, at its
first op, and lies in the arena from then on, that of the host or that of its GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from allfold._group import Group

_SMALLEST = 1 << 20
_ENGINE = "_engine_run_backward"  # of torch/autograd/graph.py


def adopt_bucket(group: Group, tensors: Sequence[torch.Tensor]) -> None:
    """Move the tensors of an all-reduce to the arena, if they are a bucket of DDP.

    DDP calls process groups out of the autograd engine. Memory that a script brings itself stays
    where it is: NumPy arrays over it, which torch does not know of, would lose it.
    """
    if len(tensors) == 1 and _can_move(tensors[0]) and _called_by_engine():
        adopt(group, tensors[0])


def _called_by_engine() -> bool:
    """Return whether the autograd engine called a method with :func:`adopt_bucket`, through C++.

    The method is decorated. The engine's threads for GPUs have no Python below that at all.
    """
    caller = sys._getframe(3).f_back
    return caller is None or caller.f_code.co_name == _ENGINE


def adopt(group: Group, tensor: torch.Tensor) -> None:
    """Move the memory of a tensor, and of all that share its storage, to the arena.

    Only large tensors that fill a storage of their own are moved. The storage cannot be resized
    from then on. The arena has its memory back when the storage dies.

    Raises:
        ArenaExhausted: no memory is left.
    """
    if _can_move(tensor) and not _lies_in_arena(group, tensor):
        storage: Any = tensor.untyped_storage()
        home = group.empty(tensor.nbytes, torch.uint8, device=tensor.device).untyped_storage()
        home.copy_(storage)
        if tensor.is_cuda:  # its old memory goes to somebody else now
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        storage._swap_data_ptr_(home)


def _lies_in_arena(group: Group, tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in the arena; also true on a GPU that has none."""
    session = group.membership.session
    arena = session.arena
    if tensor.is_cuda:
        gpu = session.gpu(tensor.get_device())
        if not gpu.shares_memory:
            return True
        arena = gpu.arrays
    return arena.locate(tensor.data_ptr(), tensor.nbytes) is not None


def _may_lie_anywhere() -> bool:
    """Return whether torch accepts memory on GPUs that it has not allocated.

    With its allocator cudaMallocAsync, ``record_stream`` of such a tensor fails in C++.
    """
    return torch.cuda.get_allocator_backend() == "native"


def _can_move(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= _SMALLEST
        and (tensor.is_cpu or (tensor.is_cuda and _may_lie_anywhere()))
        and not tensor._is_view()
        and tensor.is_contiguous()
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # is none of torch's promises
    )
