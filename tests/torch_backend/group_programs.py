"""Requests of torch to a process group beside collectives."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from allfold.torch import ElasticSampler
from tests.torch_backend.collective_programs import isend
from tests.torch_backend.in_group import TIMEOUT, check, in_group, world


@in_group
def about_the_group(rank: int, size: int) -> None:
    group: Any = world()
    assert (group.rank(), group.size(), group.name()) == (rank, size, "allfold")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "allfold")
    assert group.group_name
    assert group.group_desc == "default_pg"
    assert group._get_backend(torch.device("cpu")) is group
    assert not group.supports_window
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert group._device_types == [cpu]
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert group._device_types == [cpu, gpu]
    longer = timedelta(seconds=90)
    dist.distributed_c10d._set_pg_timeout(longer)
    assert group.group.timeout == 90
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
    assert group.group.timeout == TIMEOUT.total_seconds()
    dist.monitored_barrier()
    dist.monitored_barrier(group, timeout=longer, wait_all_ranks=True)


@in_group
def share_of_a_batch(rank: int, size: int, length: int) -> list[int]:
    """This rank's samples of a batch that has all samples."""
    split = ElasticSampler(range(length), length).plan(0)
    assert split.split.members == f"{world().group.name} 0"  # type: ignore[attr-defined]
    return [int(sample) for sample in split.indices]


@in_group
def in_a_profile(rank: int, size: int) -> dict[str, list[list[list[int]]]]:
    """The shapes of all calls that a profile shows, by name; one op outlives the profile."""
    peer = rank ^ 1
    tensor, whole, block = torch.ones(2, 3), torch.ones(2 * size, 3), torch.empty(2, 3)
    blocks = [torch.empty(2, 3) for _ in range(size)]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather(blocks, tensor)
        dist.all_gather_into_tensor(whole, tensor)
        dist.gather(tensor, blocks if rank == 0 else None, 0)
        dist.scatter(block, blocks if rank == 0 else None, 0)
        dist.reduce_scatter(block, blocks)
        dist.reduce_scatter_tensor(block, whole)
        dist.all_to_all(blocks, list(whole.chunk(size)))
        dist.all_to_all_single(torch.empty_like(whole), whole)
        sending = isend(tensor, peer)
        dist.recv(block, peer)
        sending.wait()
        sending = isend(tensor, peer)
        dist.recv(block)
        sending.wait()
        dist.barrier()
        longer = dist.all_reduce(tensor, async_op=True)
    longer.wait()
    shapes: dict[str, list[list[list[int]]]] = {}
    for event in profile.events():
        kind = event.name.removeprefix("allfold:")
        if kind != event.name:
            shapes.setdefault(kind, []).append(event.input_shapes)
    return shapes


def bound_to_a_gpu(rank: int, world_size: int, agent: str, store: str) -> list[float]:
    """A default group with a ``device_id``, as torch advises; there need not be that device."""
    os.environ["ALLFOLD_SOCKET"] = agent
    accelerator: Any = torch.accelerator
    gpu = torch.device("cuda", 0)
    with (
        mock.patch.object(accelerator, "current_accelerator", lambda *_: torch.device("cuda")),
        mock.patch.object(accelerator, "device_count", lambda: 1),
    ):
        dist.init_process_group(
            "allfold",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=gpu,
        )
    try:
        backend: Any = world()._get_backend(gpu)
        assert not backend.supports_tensor_alloc(gpu)
        assert not backend.supports_time_estimate
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=dist.new_group())
        return [float(each) for each in tensor]
    finally:
        dist.destroy_process_group()


@in_group
def all_reduced_on_the_cpu(rank: int, size: int) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    check(tensor, [size] * 2)


def warnings_of(backend: str, **arguments: Any) -> list[str]:
    """Return the warnings of opening a group of such a backend; the group works on the CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_reduced_on_the_cpu(backend=backend, **arguments)
    return [str(each.message) for each in caught if "Allfold" in str(each.message)]
