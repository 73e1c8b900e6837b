"""Trainings on a device, step by step beside the same one in a single process.

Every rank computes the gradients of all ranks' batches by itself; their mean, in float64, is what
must come out. What is added up in float32 differs from it by the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import allfold
from allfold.torch.hook import HookState, hook
from tests.gpu.devices import (
    delay_results,
    keep_busy,
    lies_in_arena,
    new_stream,
    on,
    path_of,
    take,
)
from tests.torch_backend.in_group import in_group, world
from tests.torch_backend.training_programs import Network, layers, shard_layers

STEPS = 6
RELATIVE = 1e-6
_WIDE = 600  # a layer of it fills a bucket that is moved to the arena


def _network(sometimes: bool = False) -> Network:
    """Without statistics of a batch, which a single process would gather otherwise."""
    return Network(sometimes, nn.LayerNorm)


def _seeded(make: Callable[[], nn.Module], home: torch.device) -> nn.Module:
    """The same weights on every rank, of every kind of device."""
    torch.manual_seed(0)
    return make().to(home)


def _batch(rank: int, step: int, home: torch.device, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, width, generator=generator).to(home)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those of all parameters; nothing for those that were not used."""
    return [
        torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()
    ]


Loss = Callable[[nn.Module, int], torch.Tensor]


def _means(alone: nn.Module, loss_of: Loss, size: int) -> tuple[list[torch.Tensor], list[float]]:
    """The means of the gradients of all ranks, and their losses: ``loss_of(model, rank)``."""
    sums: list[torch.Tensor] = []
    losses = []
    for rank in range(size):
        alone.zero_grad()
        loss = loss_of(alone, rank)
        torch.autograd.backward(loss)
        losses.append(loss.item())
        mine = [each.double() for each in _gradients(alone)]
        sums = [one + other for one, other in zip(sums, mine, strict=True)] if sums else mine
    return [(each / size).float() for each in sums], losses


def _close(ours: list[torch.Tensor], theirs: list[torch.Tensor], relative: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=relative, atol=relative * max(scale, 1e-6))


def _on_devices(home: torch.device) -> dict[str, Any]:
    """Return DDP's arguments for a device."""
    return {"device_ids": [home.index]} if home.type == "cuda" else {}


# DDP


@in_group
def ddp(
    rank: int, size: int, *, device: str, sometimes: bool = False, no_sync: bool = False
) -> str:
    """Gradients, losses and weights of every step, with several buckets; returns the path."""
    home = take(device, rank)
    alone = _seeded(lambda: _network(sometimes), home)
    model = DistributedDataParallel(
        deepcopy(alone),
        **_on_devices(home),
        bucket_cap_mb=0.004,
        find_unused_parameters=sometimes,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            result: torch.Tensor = model(_batch(rank, step, home), step).square().mean()
            return result

        if no_sync and step % 2 == 0:
            with model.no_sync():
                torch.autograd.backward(loss_of(model, rank))
            optimizer.zero_grad()
        loss = loss_of(model, rank)
        torch.autograd.backward(loss)
        expected, losses = _means(alone, loss_of, size)
        _close(_gradients(model), expected, RELATIVE)
        assert abs(loss.item() - losses[rank]) <= RELATIVE * abs(losses[rank])
        optimizer.step()
        optimizer.zero_grad()
        alone.load_state_dict(model.module.state_dict())
    _are_identical(model)
    dist.barrier(**_on_devices(home))
    return path_of(cast(Any, world()).group, home)


def _are_identical(model: nn.Module) -> None:
    """All ranks have the same weights, bit for bit."""
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameter.detach())
        assert all(torch.equal(other, parameter) for other in others), "ranks differ"


@in_group
def ddp_in_the_arena(
    rank: int, size: int, *, device: str, views: bool, hooked: bool
) -> dict[str, Any]:
    """Tell if the gradients lie in the arena after each step; check that they are right."""
    home = take(device, rank)
    group = cast(Any, world()).group
    if hooked:
        group = allfold.init(rank=rank, world_size=size, group=f"{group.name}.hook")
    make = lambda: nn.Sequential(nn.Linear(_WIDE, _WIDE), nn.Linear(_WIDE, _WIDE))  # noqa: E731
    alone = _seeded(make, home)
    model = DistributedDataParallel(
        deepcopy(alone), **_on_devices(home), bucket_cap_mb=1, gradient_as_bucket_view=views
    )
    if hooked:
        model.register_comm_hook(HookState(group, name="arena"), hook)
    found = []
    for step in range(4):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            result: torch.Tensor = model(_batch(rank, step, home, _WIDE)).square().sum()
            return result

        model.zero_grad()
        torch.autograd.backward(loss_of(model, rank))
        _close(_gradients(model), _means(alone, loss_of, size)[0], 1e-5)
        weights = [each for each in _gradients(model) if each.dim() == 2]
        found.append(all(lies_in_arena(group, each) for each in weights))
    path = path_of(group, home)
    if hooked:
        allfold.shutdown(group)
    return {
        "path": path,
        "in the arena": found,
        "can move": hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    }


@in_group
def ddp_hook(rank: int, size: int, *, device: str, wire: str | None) -> float:
    """Gradients that the hook averages: how far they are from the truth, relative to it."""
    home = take(device, rank)
    group = allfold.init(
        rank=rank, world_size=size, group=f"{cast(Any, world()).group.name}.{wire}"
    )
    alone = _seeded(_network, home)
    model = DistributedDataParallel(deepcopy(alone), **_on_devices(home), bucket_cap_mb=0.004)
    model.register_comm_hook(HookState(group, wire=wire), hook)
    worst = 0.0
    for step in range(STEPS):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            result: torch.Tensor = model(_batch(rank, step, home), step).square().mean()
            return result

        model.zero_grad()
        torch.autograd.backward(loss_of(model, rank))
        expected = _means(alone, loss_of, size)[0]
        scale = max(each.abs().max().item() for each in expected)
        apart = max(
            (one - other).abs().max().item()
            for one, other in zip(_gradients(model), expected, strict=True)
        )
        worst = max(worst, apart / scale)
    allfold.shutdown(group)
    return worst


@in_group
def futures(rank: int, size: int, *, device: str) -> list[float]:
    """Check that a future's value, and a callback's result, are in order on the current stream."""
    home = take(device, rank)
    group = cast(Any, world()).group
    with on(new_stream(home)):
        keep_busy(home, 0.2)
        tensor = torch.full((1 << 20,), rank + 1.0, device=home)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        delay_results(group, home, 0.5)
        (result,) = future.wait()
        assert result is tensor
        first = (result + 0).max().item()
        tensor.fill_(rank + 1.0)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        tripled = future.then(lambda done: done.value()[0] * 3)
        delay_results(group, home, 0.5)
        second = (tripled.wait() + 0).max().item()
    with on(new_stream(home)):
        third = (tripled.wait() + 0).min().item()
    return [first, second, third]


# FSDP2


@in_group
def fsdp2(rank: int, size: int, *, device: str, mesh: list[int]) -> str:
    """Losses and weights of every step; over one dimension, or replicated over another."""
    home = take(device, rank)
    alone = _seeded(layers, home)
    names = ("shard",) if len(mesh) == 1 else ("replicate", "shard")
    over = init_device_mesh(home.type, tuple(mesh), mesh_dim_names=names)
    model = shard_layers(deepcopy(alone), over, MixedPrecisionPolicy())
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (model, alone)]
    for step in range(STEPS):

        def loss_of(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            result: torch.Tensor = model(_batch(rank, step, home)).square().mean()
            return result

        loss = loss_of(model, rank)
        torch.autograd.backward(loss)
        expected, losses = _means(alone, loss_of, size)
        assert abs(loss.item() - losses[rank]) <= 1e-5 * abs(losses[rank])
        for parameter, mean in zip(alone.parameters(), expected, strict=True):
            parameter.grad = mean
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = [each.full_tensor().detach() for each in model.parameters()]
        assert all(each.device == home for each in whole)
        _close(whole, [each.detach() for each in alone.parameters()], 1e-5)
    return path_of(cast(Any, world()).group, home)


@in_group
def fsdp2_in_half_precision(rank: int, size: int, *, device: str) -> None:
    """Gradients are bfloat16, and so is their mean.

    Those of a rank alone may differ in their last bit: where a weight lies decides which kernel a
    GPU multiplies it with.
    """
    home = take(device, rank)
    alone = _seeded(layers, home)
    mesh = init_device_mesh(home.type, (size,))
    model = shard_layers(
        deepcopy(alone), mesh, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    )
    alone = alone.bfloat16()
    for step in range(3):
        batch = _batch(rank, step, home).bfloat16()
        for each in (model, alone):
            torch.autograd.backward(each(batch).float().square().mean())
        for sharded, mine in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None
            everyone = [torch.empty_like(mine.grad) for _ in range(size)]
            dist.all_gather(everyone, mine.grad)
            mean = torch.stack(everyone).double().sum(0) / size
            reduced = sharded.grad.full_tensor()
            assert torch.equal(reduced.bfloat16().double(), reduced.double()), "not of bfloat16"
            _close([reduced.double()], [mean], 2**-7)
        model.zero_grad()
        alone.zero_grad()
