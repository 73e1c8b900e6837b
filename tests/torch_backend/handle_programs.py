"""Programs about handles: whatever says that an op is over means that its result is there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

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


def _trained(model: Any, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    return [float(each) for each in nn.utils.parameters_to_vector(model.parameters())]


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


@in_group
def delayed_gradients(rank: int, size: int) -> list[float]:
    """DDP drops the handle of these gradients, and the optimizer takes them at once."""
    network = _network()
    named = list(network.named_parameters())
    model = DistributedDataParallel(
        network, delay_all_reduce_named_params=named[2:], param_to_hook_all_reduce=named[0][1]
    )
    return _trained(model, rank)


@in_group
def joined(rank: int, size: int) -> list[float]:
    """Ranks with more batches than others: the mean is that of the ranks which are left."""
    model = DistributedDataParallel(_network())
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            model.zero_grad()
            model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
    return [float(each) for each in nn.utils.parameters_to_vector(model.parameters())]


@in_group
def gradients_of_those_left(rank: int, size: int) -> list[float]:
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    got: list[float] = []
    with Join([model], divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            gradient = model.module.weight.grad
            assert gradient is not None
            got.append(float(gradient))
    return got


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
