"""Means of integers: the sum, divided by the number of ranks, truncated towards zero."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.torch_backend.in_group import check, in_group, world

AVG = dist.ReduceOp.AVG
DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_STARTS = (7, -7, 0, -1)


def _given(rank: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([start + 2 * rank for start in _STARTS], dtype=dtype)


def _mean(size: int) -> list[int]:
    return [int(sum(start + 2 * rank for rank in range(size)) / size) for start in _STARTS]


@in_group
def all_reduced(rank: int, size: int) -> None:
    for dtype in DTYPES:
        tensor = _given(rank, dtype)
        dist.all_reduce(tensor, AVG)
        check(tensor, _mean(size))
    small = torch.tensor([rank], dtype=torch.uint8)
    dist.all_reduce(small, AVG)
    check(small, [(size - 1) // 2])
    strided = torch.zeros(4, 2, dtype=torch.int64)
    strided[:, 0] = _given(rank)
    dist.all_reduce(strided[:, 0], AVG)
    check(strided.T, [_mean(size), [0] * 4])
    check(functional_collectives.all_reduce(_given(rank), "avg", world()), _mean(size))


@in_group
def divided_once(rank: int, size: int) -> None:
    """However often, and in whatever way, an op is waited for."""
    tensors = [_given(rank) for _ in range(3)]
    waited, future, both = (dist.all_reduce(tensor, AVG, async_op=True) for tensor in tensors)
    waited.wait()
    waited.wait()
    assert waited.is_success()
    check(future.get_future().then(lambda done: done.value()[0]).wait(), _mean(size))
    coming = both.get_future()
    both.wait()
    check(coming.wait()[0], _mean(size))
    check(tensors, [_mean(size)] * 3)


@in_group
def held(rank: int, size: int) -> None:
    """Of many that were waited for, no handle is kept, though nothing else is called."""
    handles = []
    for _ in range(20):
        tensor = _given(rank)
        work = dist.all_reduce(tensor, AVG, async_op=True)
        work.wait()
        check(tensor, _mean(size))
        handles.append(weakref.ref(work))
    kept = sum(each() is not None for each in handles)
    assert kept <= 2, kept  # the last one, and this variable


@in_group
def reduced(rank: int, size: int) -> None:
    for root in range(size):
        tensor = _given(rank)
        dist.reduce(tensor, root, AVG)
        check(tensor, _mean(size) if rank == root else _given(rank))


@in_group
def scattered(rank: int, size: int) -> None:
    block = torch.empty(4, dtype=torch.int64)
    dist.reduce_scatter(block, [_given(rank)] * size, AVG)
    check(block, _mean(size))
    block.zero_()
    dist.reduce_scatter_tensor(block, _given(rank).repeat(size), AVG)
    check(block, _mean(size))


@in_group
def coalesced(rank: int, size: int) -> None:
    singles: list[Any] = [_given(rank), _given(rank).float(), _given(rank, torch.int16)]
    with _coalescing_manager():
        for tensor in singles:
            dist.all_reduce(tensor, AVG)
    exact = [sum(start + 2 * each for each in range(size)) / size for start in _STARTS]
    check(singles, [_mean(size), exact, _mean(size)])
    blocks = [torch.empty(4, dtype=torch.int64) for _ in range(2)]
    with _coalescing_manager():
        for block in blocks:
            dist.reduce_scatter_tensor(block, _given(rank).repeat(size), AVG)
    check(blocks, [_mean(size)] * 2)
