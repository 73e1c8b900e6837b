"""Collectives, and trainings, in functions that torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.nn.parallel import DistributedDataParallel

import allfold
from allfold.torch.hook import HookState, hook
from tests.torch_backend.collective_programs import isend
from tests.torch_backend.in_group import check, in_group, total

# It traces as the default one does, and generates no code.
BACKEND = "aot_eager"


def compiled(function: Any) -> Any:
    """Compile a function anew."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    return torch.compile(function, backend=BACKEND)


def _nothing_of_allfold_was_compiled() -> None:
    files = [each.co_filename or "" for each in get_compilation_metrics()]
    assert files
    ours = Path(allfold.__file__).parent
    assert not [file for file in files if Path(file).is_relative_to(ours)]


def _with_result(work: dist.Work) -> torch.Tensor:
    (result,) = work.get_future().wait()
    tensor: torch.Tensor = result
    return tensor


@in_group
def collectives(rank: int, size: int) -> None:
    def at_once(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    def later(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        work = dist.all_reduce(doubled, async_op=True)
        work.wait()
        return doubled + int(work.is_completed())

    def by_future(tensor: torch.Tensor) -> torch.Tensor:
        return _with_result(dist.all_reduce(tensor * 2, async_op=True)) + 1

    def after_a_barrier(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.barrier()
        dist.reduce(doubled, 0)
        dist.broadcast(doubled, 0)
        return doubled + 1

    expected = [2 * total(size) + 1] * 3
    for function in (at_once, later, by_future, after_a_barrier):
        check(compiled(function)(torch.full((3,), rank + 1.0)), expected)
        _nothing_of_allfold_was_compiled()


@in_group
def movement(rank: int, size: int) -> None:
    everyone = range(size)

    def scattered(tensor: torch.Tensor) -> torch.Tensor:
        block = torch.empty(3)
        dist.scatter(block, [tensor * to for to in everyone] if rank == 0 else None)
        return block + 1

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        blocks = [torch.empty(3) for _ in everyone]
        dist.all_gather(blocks, tensor * rank)
        return torch.stack(blocks).sum(0) + 1

    def around(tensor: torch.Tensor) -> torch.Tensor:
        got = torch.empty(3)
        sending = isend(tensor * rank, (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        sending.wait()
        return got + 1

    def in_a_batch(tensor: torch.Tensor) -> torch.Tensor:
        got = torch.empty(3)
        sending = dist.P2POp(dist.isend, tensor * rank, (rank + 1) % size)
        receiving = dist.P2POp(dist.irecv, got, (rank - 1) % size)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        return got + 1

    for function, expected in (
        (scattered, rank + 1),
        (gathered, total(size - 1) + 1),
        (around, (rank - 1) % size + 1),
        (in_a_batch, (rank - 1) % size + 1),
    ):
        check(compiled(function)(torch.ones(3)), [expected] * 3)
        _nothing_of_allfold_was_compiled()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _weights_after(rank: int, wrap: Callable[[Any], Any], step: Any) -> list[torch.Tensor]:
    """The weights after three steps of a training."""
    model = wrap(DistributedDataParallel(_network()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        step(model, optimizer, torch.randn(4, 8, generator=generator))
    return [parameter.detach().clone() for parameter in model.parameters()]


def _step(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    everywhere = loss.detach().clone()
    dist.all_reduce(everywhere, dist.ReduceOp.AVG)
    return everywhere


@in_group
def training(rank: int, size: int) -> None:
    """A compiled model, and a compiled step, give the weights of those that are not."""
    plain = _weights_after(rank, lambda model: model, _step)
    torch.testing.assert_close(_weights_after(rank, compiled, _step), plain)
    _nothing_of_allfold_was_compiled()
    torch.testing.assert_close(_weights_after(rank, lambda model: model, compiled(_step)), plain)
    _nothing_of_allfold_was_compiled()


@in_group
def training_with_the_hook(rank: int, size: int) -> None:
    group = allfold.init(rank=rank, world_size=size, group="compiled-hook")

    def hooked(model: Any) -> Any:
        model.register_comm_hook(HookState(group), hook)
        return model

    plain = _weights_after(rank, lambda model: model, _step)
    torch.testing.assert_close(_weights_after(rank, hooked, compiled(_step)), plain)
    _nothing_of_allfold_was_compiled()
    allfold.shutdown(group)
