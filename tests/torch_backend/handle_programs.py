"""Programs about handles: whatever says that an op is over means that its result is there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from tests.support.waiting import wait_until
from tests.torch_backend.in_group import check, in_group, total, world

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def _waited(work: dist.Work) -> None:
    assert work.wait(timedelta(seconds=20))


def _polled(work: dist.Work) -> None:
    wait_until(work.is_completed, "the op is over")


def _succeeded(work: dist.Work) -> None:
    wait_until(work.is_success, "the op has succeeded")


def _without_error(work: dist.Work) -> None:
    wait_until(work.is_completed, "the op is over")
    assert work.exception() is None


def _asked_for_result(work: dist.Work) -> None:
    assert work.result()


def _synchronized(work: dist.Work) -> None:
    work.synchronize()


def _by_future(work: dist.Work) -> None:
    work.get_future().wait()


def _by_callback(work: dist.Work) -> None:
    seen: list[list[float]] = []
    future = work.get_future().then(lambda done: seen.append(done.value()[0].tolist()))
    future.wait()
    assert seen == [work.result()[0].tolist()]


WAYS: dict[str, Callable[[dist.Work], None]] = {
    way.__name__: way
    for way in (
        _waited,
        _polled,
        _succeeded,
        _without_error,
        _asked_for_result,
        _synchronized,
        _by_future,
        _by_callback,
    )
}


def _sums_and_means(rank: int, size: int) -> list[tuple[torch.Tensor, Any, list[float]]]:
    """Tensors, the operations to reduce them with, and what is to come of them."""
    mean = total(size) / size
    return [
        (torch.full((3,), rank + 1.0), SUM, [total(size)] * 3),
        (torch.full((3,), rank + 1), AVG, [int(mean)] * 3),
        (torch.full((3, 2), rank + 1.0)[:, 0], SUM, [total(size)] * 3),
    ]


@in_group
def known_to_be_over(rank: int, size: int, way: str) -> None:
    for tensor, op, expected in _sums_and_means(rank, size):
        WAYS[way](dist.all_reduce(tensor, op, async_op=True))
        check(tensor, expected)
        tensor.fill_(-1)
        dist.barrier()
        check(tensor, [-1] * 3)


@in_group
def means_of_dropped_handles(rank: int, size: int) -> None:
    tensor = torch.full((3,), rank + 1)
    dist.all_reduce(tensor, AVG, async_op=True)
    dist.barrier()
    check(tensor, [total(size) // size] * 3)
    dist.all_reduce(tensor.fill_(rank + 1), AVG, async_op=True)
    wait_until(lambda: tensor.tolist() == [total(size) // size] * 3, "the sum is divided")


def left_in_flight(rank: int, world_size: int, agent: str, store: str) -> None:
    """A group that is destroyed while handles are kept, which are not waited for."""
    sums: list[Any] = []

    @in_group
    def program(rank: int, size: int) -> None:
        for tensor, op, expected in _sums_and_means(rank, size):
            sums.append((tensor, dist.all_reduce(tensor, op, async_op=True), expected))

    program(rank, world_size, agent, store)
    for tensor, _, expected in sums:
        check(tensor, expected)


@in_group
def inputs_in_flight(rank: int, size: int) -> None:
    """Tensors that a graph waits for, which was not there when their op was called."""
    wait_tensor = torch.ops._c10d_functional.wait_tensor
    for late in range(size):
        with allow_inflight_collective_as_graph_input_ctx():
            tensor = torch.full((3,), rank + 1.0)
            whole = torch.zeros(3 * size)
            if rank == late:
                sleep(0.05)
            dist.all_reduce(tensor, async_op=True)
            dist.all_gather_into_tensor(whole, torch.full((3,), float(rank)), async_op=True)
            check(wait_tensor(tensor), [total(size)] * 3)
            check(wait_tensor(whole), [each for each in range(size) for _ in range(3)])
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    assert world().size() == size
