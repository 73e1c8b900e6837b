"""Programs of replicas, which torchft's face of Allfold puts into groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import torch
import torchft.process_group
from torch import nn
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
    BarrierOptions,
    ReduceOp,
    ReduceScatterOptions,
)
from torchft.work import _DummyWork

from allfold import AllfoldError
from allfold.torchft import DistributedDataParallel, ProcessGroupAllfold
from allfold_core.errors import PeerLost
from tests.support.waiting import wait_until

TIMEOUT = timedelta(seconds=20)


class Replica:
    """A process group, and the store in which its quorums meet."""

    def __init__(self, agent: str, store: str, **options: Any) -> None:
        os.environ["ALLFOLD_SOCKET"] = agent
        # Workers start one after the other, unlike replicas that a lighthouse calls together.
        self.group = ProcessGroupAllfold(**{"timeout": TIMEOUT, "opening": TIMEOUT} | options)
        self._store = store

    def enter(self, quorum: int, rank: int, world_size: int) -> None:
        """Enter a quorum as the parameter server of the installed torchft does.

        After 0.2 the replicas exchange handles, and their groups have no ``configure`` any more.
        """
        exchange = getattr(torchft.process_group, "reconfigure_with_store", None)
        if exchange is None:
            self.configure(quorum, rank, world_size)
        else:
            exchange(self.group, f"{self._store}/torchft/handles/{quorum}", rank, world_size)

    def configure(self, quorum: int, rank: int, world_size: int) -> None:
        """Enter a quorum, as torchft 0.2 does; its Manager names no arguments."""
        address = f"{self._store}/torchft/{quorum}/0"
        self.group.configure(address, replica_id="0", rank=rank, world_size=world_size)

    def sum_of(self, value: float) -> float:
        """Return the sum of the replicas' values."""
        tensor = torch.tensor([value])
        self.group.allreduce([tensor], ReduceOp.SUM).wait()
        return tensor.item()


def collectives(rank: int, world_size: int, **where: str) -> dict[str, list[float]]:
    """Call what torchft's Manager, its transports and its HSDP call."""
    replica = Replica(**where)
    replica.enter(1, rank, world_size)
    group, mine = replica.group, torch.tensor([float(rank + 1)])
    gathered = [torch.zeros(1) for _ in range(world_size)]
    group.allgather([gathered], [mine], AllgatherOptions()).wait()
    scattered, parts = torch.zeros(1), [mine * (part + 1) for part in range(world_size)]
    group.reduce_scatter([scattered], [parts], ReduceScatterOptions()).wait()
    first = mine.clone()
    group.broadcast_one(first, 0).wait()
    means: Any = AllreduceOptions()
    means.reduceOp = ReduceOp.AVG
    mean = mine.clone()
    (given,) = group.allreduce([mean], means).get_future().wait()
    passed = torch.zeros(1)
    if rank == 0:
        group.send([mine], 1, 0).wait()
    elif rank == 1:
        group.recv([passed], 0, 0).wait()
    group.barrier(BarrierOptions()).wait()
    found = {
        "allgather": torch.cat(gathered),
        "reduce_scatter": scattered,
        "broadcast": first,
        "mean": given,
        "passed": passed,
    }
    group.shutdown()
    return {name: tensor.tolist() for name, tensor in found.items()}


def lose_the_last(rank: int, world_size: int, **where: str) -> dict[str, Any]:
    """The last replica dies; the others meet in a quorum without it."""
    replica = Replica(**where)
    replica.enter(1, rank, world_size)
    assert replica.sum_of(1.0) == world_size
    if rank == world_size - 1:
        os._exit(1)
    before = replica.group.errored()
    try:
        replica.sum_of(1.0)
    except AllfoldError as error:
        raised = error
    noted = replica.group.errored()
    replica.enter(2, rank, world_size - 1)
    return {
        "error": str(raised),
        "noted": [before is None, noted is raised, replica.group.errored() is None],
        "sum": replica.sum_of(1.0),
    }


def wait_for_one_that_never_comes(rank: int, world_size: int, **where: str) -> dict[str, Any]:
    """A quorum of two, of which one has died before it came; then another of one."""
    replica = Replica(**where, opening=timedelta(seconds=0.2))
    try:
        replica.configure(1, rank, world_size + 1)
    except AllfoldError as error:
        raised = error
    replica.configure(2, rank, world_size)
    return {"error": str(raised), "sum": replica.sum_of(3.0)}


def reconfigure_with_an_op_in_flight(rank: int, world_size: int, **where: str) -> dict[str, Any]:
    """The first replica waits for others; a quorum that comes meanwhile ends that op."""
    replica = Replica(**where)
    replica.enter(1, rank, world_size)
    work = replica.group.allreduce([torch.ones(1)], ReduceOp.SUM) if rank == 0 else None
    replica.enter(2, rank, world_size)
    total = replica.sum_of(1.0)
    if work is None:
        return {"error": "", "sum": total}
    try:
        work.wait()
    except PeerLost:  # also BelowMinWorld, where all others had left before the nodes agreed
        return {"error": "PeerLost", "sum": total}
    return {"error": "none", "sum": total}


def wait_then_look_at_the_future(rank: int, world_size: int, **where: str) -> bool:
    """Tell if a future is done after its op, also behind one whose callback takes a while."""
    replica = Replica(**where)
    replica.enter(1, rank, world_size)
    first, second = (replica.group.allreduce([torch.ones(1)], ReduceOp.SUM) for _ in range(2))
    futures = [work.get_future() for work in (first, second)]
    slow = futures[0].then(lambda _: wait_until(second.is_completed, "the second op"))
    second.wait()
    done = futures[1].done()
    slow.wait()
    return bool(done)


def backward_after_a_loss(rank: int, world_size: int, **where: str) -> bool:
    """Tell if there are gradients; all that the Manager has after a loss is a work of its own."""
    manager = Mock()
    manager.allreduce.side_effect = _DummyWork
    model = DistributedDataParallel(manager, nn.Linear(3, 1))
    model(torch.ones(1, 3)).sum().backward()
    return bool(model.module.weight.grad.eq(1).all())
