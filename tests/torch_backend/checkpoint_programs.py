"""Checkpoints of torch.distributed, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.in_group import check, in_group


@in_group
def checkpoint(rank: int, size: int, *, folder: str) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size)
    state = {"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
    save(state, checkpoint_id=Path(folder) / "checkpoint")
    empty: dict[str, Any] = {
        "weights": distribute_tensor(torch.zeros(4 * size), mesh, [Shard(0)]),
        "step": 0,
    }
    load(empty, checkpoint_id=Path(folder) / "checkpoint")
    assert empty["step"] == 7
    check(empty["weights"].full_tensor(), whole)


@in_group
def checkpoint_in_the_background(rank: int, size: int, *, folder: str) -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size)
    state = {"weights": distribute_tensor(whole, mesh, [Shard(0)])}
    saving: Any = async_save(state, checkpoint_id=Path(folder) / "checkpoint")
    saving.result(20.0)
    empty = {"weights": distribute_tensor(torch.zeros(4 * size), mesh, [Shard(0)])}
    load(empty, checkpoint_id=Path(folder) / "checkpoint")
    check(empty["weights"].full_tensor(), whole)


@in_group
def checkpoints_beside_a_training(rank: int, size: int, *, folder: str) -> None:
    """A group of their own keeps the collectives of ``async_save`` from meeting the training's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = dist.new_group()
    for number in range(3):
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        place = Path(folder) / str(number)
        saving: Any = async_save(expected, checkpoint_id=place, process_group=checkpoints)
        steps = 0
        while not _done_everywhere(saving) or steps < 3:
            optimizer.zero_grad()
            model(torch.full((2, 4), rank + 1.0)).sum().backward()
            optimizer.step()
            steps += 1
        saving.result()
        loaded = {name: torch.zeros_like(value) for name, value in expected.items()}
        load(loaded, checkpoint_id=place)
        check(list(loaded.values()), list(expected.values()))


def _done_everywhere(saving: Any) -> bool:
    """Ask in the group of the training, so that all ranks do as many steps."""
    done = torch.tensor(float(saving.done()))
    dist.all_reduce(done, dist.ReduceOp.MIN)
    return bool(done)


@in_group
def weights_that_rank_0_alone_has(rank: int, size: int) -> None:
    """Rank 0 brings all weights of a sharded model, the other ranks nothing."""
    torch.manual_seed(rank)
    whole = nn.Linear(4, 2 * size)
    shared = [whole.weight.detach().clone(), whole.bias.detach().clone()]
    for tensor in shared:
        dist.broadcast(tensor, 0)
    model = nn.Linear(4, 2 * size)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if rank == 0 else {}, options=options)
    everything = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    check([everything["weight"], everything["bias"]], shared)
