"""DDP over Gloo whose gradients Allfold averages."""

from __future__ import annotations

import itertools
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import allfold
from allfold.torch.hook import HookState, hook
from tests.torch_backend.in_group import check, in_group, total
from tests.torch_backend.training_programs import Network, batches, seeded

_hooked = itertools.count()


@in_group
def ddp_hook(rank: int, size: int, *, wire: str | None, feedback: bool = True) -> list[float]:
    """DDP over Gloo whose gradients Allfold averages; the losses of plain DDP come close."""
    group = allfold.init(rank=rank, world_size=size, group=f"hook{next(_hooked)}")
    hooked, plain = (DistributedDataParallel(seeded(Network), bucket_cap_mb=0.004) for _ in "12")
    hooked.register_comm_hook(HookState(group, wire=wire, feedback=feedback), hook)
    losses: list[list[float]] = [[], []]
    for model, seen in ((hooked, losses[0]), (plain, losses[1])):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step, batch in enumerate(batches(rank)):
            loss = model(batch, step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    for parameter in hooked.parameters():
        others = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(others, parameter.detach())
        assert all(torch.equal(other, parameter) for other in others), "ranks differ"
    allfold.shutdown(group)
    return [abs(one - other) for one, other in zip(*losses, strict=True)]


class _Bucket:
    def __init__(self, gradient: torch.Tensor, index: int) -> None:
        self._gradient = gradient
        self._index = index

    def buffer(self) -> torch.Tensor:
        return self._gradient

    def index(self) -> int:
        return self._index


def bucket(gradient: torch.Tensor, index: int = 0) -> GradBucket:
    """Return the parts of DDP's bucket that the hook uses; a true one is made by DDP alone."""
    return cast(GradBucket, _Bucket(gradient, index))


@in_group
def means_of_hooked_steps(
    rank: int, size: int, *, feedback: bool, steps: int = 32
) -> list[list[float]]:
    """Return the error of the mean of all steps, for two models that take turns.

    Each has one constant gradient. The error of the worst element, after one step and after all.
    """
    group = allfold.init(rank=rank, world_size=size, group=f"hook{next(_hooked)}")
    states = [HookState(group, wire="int8", feedback=feedback) for _ in "12"]
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, generator=generator) for _ in states]
    sums = [torch.zeros(1000, dtype=torch.float64) for _ in states]
    apart: list[list[float]] = [[], []]
    for step in range(1, steps + 1):
        for state, gradient, total_, seen in zip(states, gradients, sums, apart, strict=True):
            total_ += hook(state, bucket(gradient * (rank + 1))).wait()
            if step in (1, steps):
                truth = gradient.double() * total(size) / size
                seen.append((total_ / step - truth).abs().max().item())
    allfold.shutdown(group)
    return apart


@in_group
def buckets_of_another_size(rank: int, size: int) -> None:
    """They begin with nothing owed, as in a model that begins."""
    group = allfold.init(rank=rank, world_size=size, group=f"hook{next(_hooked)}")
    used, fresh = (HookState(group, wire="int8") for _ in "12")
    generator = torch.Generator().manual_seed(rank)
    large, small = torch.randn(1000, generator=generator), torch.randn(700, generator=generator)
    hook(used, bucket(large.clone())).wait()
    assert used.options(bucket(large)) == used.options(bucket(small))
    expected = hook(fresh, bucket(small.clone())).wait()
    check(hook(used, bucket(small.clone())).wait(), expected)
    again = hook(used, bucket(small.clone())).wait()
    assert not torch.equal(again, expected), "nothing is owed"
    allfold.shutdown(group)


@in_group
def a_hook_that_fails(rank: int, size: int) -> str:
    """Return the error of backward after rank 0 has called another op."""
    group = allfold.init(rank=rank, world_size=size, group=f"hook{next(_hooked)}")
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(HookState(group), hook)
    if rank == 0:
        group.barrier(async_op=True)
    message = "nothing"
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        message = str(error)
    allfold.shutdown(group)
    return message
