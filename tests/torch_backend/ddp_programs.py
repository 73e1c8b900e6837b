"""Trainings in which DDP drops handles, or keeps one of them in C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.in_group import in_group


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
