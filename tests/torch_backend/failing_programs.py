"""Programs of ranks in which something goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allfold import AllfoldError
from tests.torch_backend.in_group import check, in_group, world


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (AllfoldError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@in_group
def different_shapes(rank: int, size: int) -> dict[str, str]:
    """The last rank brings another shape, to each way of waiting; the group goes on after it."""

    def tensor() -> torch.Tensor:
        return torch.ones(3 if rank < size - 1 else 4)

    def in_flight() -> dist.Work:
        work: dist.Work = dist.all_reduce(tensor(), async_op=True)
        return work

    messages = {
        "call": _error_of(lambda: dist.all_reduce(tensor())),
        "wait": _error_of(lambda: in_flight().wait()),
        "future": _error_of(lambda: in_flight().get_future().wait()),
        "then": _error_of(lambda: in_flight().get_future().then(lambda f: f.value()).wait()),
        "function": _error_of(
            lambda: functional_collectives.all_reduce(tensor(), "sum", world()).clone()
        ),
    }
    failed = in_flight()
    while not failed.is_completed():
        time.sleep(0.01)
    assert not failed.is_success()
    messages["exception"] = _error_of(lambda: _raise(failed.exception()))
    good = torch.ones(2)
    dist.all_reduce(good)
    check(good, [size] * 2)
    return messages


def _raise(error: BaseException | None) -> None:
    assert error is not None
    raise error


@in_group
def refused(rank: int, size: int) -> list[str]:
    """Return the errors that this rank alone can see: they raise at the call, and send nothing."""
    whole = torch.ones(4)
    messages = [
        _error_of(lambda: dist.all_reduce(torch.ones(4, dtype=torch.bool), dist.ReduceOp.AVG)),
        _error_of(lambda: dist.all_reduce(whole.expand(3, 4))),
        _error_of(lambda: dist.all_reduce(whole.to_sparse())),
        _error_of(lambda: dist.broadcast(whole.to("meta"), 0)),
        _error_of(lambda: dist.all_gather_into_tensor(torch.empty(4 * size + 1), whole)),
    ]
    dist.all_reduce(whole)
    check(whole, [size] * 4)
    return messages


@in_group
def abort_a_sub_group(rank: int, size: int) -> tuple[str, float, str]:
    """Return an op's error after rank 0 aborts the group, and how soon; and the error elsewhere.

    The last rank does not call it, so that it cannot end before.
    """
    group = dist.new_group()
    seconds, message = 0.0, ""
    if rank == 0:
        future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
        began = time.monotonic()
        group.abort()
        message = _error_of(future.wait)
        seconds = time.monotonic() - began
    elsewhere = ""
    if 0 < rank < size - 1:
        elsewhere = _error_of(lambda: dist.all_reduce(torch.ones(1), group=group))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    check(tensor, [size] * 2)
    return message, seconds, elsewhere


@in_group
def train_for_ever(rank: int, size: int, *, folder: str) -> str:
    """Steps of DDP until something fails; the file of this rank says that they have begun."""
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)), bucket_cap_mb=0.01
    )
    for step in range(100_000):
        try:
            model(torch.ones(2, 64)).sum().backward()
        except (AllfoldError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        if step == 3:
            (Path(folder) / str(rank)).touch()
    return "nothing"
