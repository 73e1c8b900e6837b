"""Functional collectives whose C++ code in torch asks a group for a backend in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx

from allfold.torch._functional import functional
from tests.torch_backend.in_group import check, in_group, total, world

_functional = torch.ops._c10d_functional
_wait: Callable[[torch.Tensor], torch.Tensor] = _functional.wait_tensor


@in_group
def asking_for_a_backend(rank: int, size: int) -> None:
    """They do on our groups what they do on those of Gloo, which go on to torch's own kernels."""
    gloo = dist.new_group(backend="gloo")
    for group in (world(), gloo):
        for name in (group, group.group_name):  # torch takes both
            _gathered_into_given_memory(rank, size, name)
        _messages_in_a_batch(rank, group.group_name)
        _traced(rank, size, group.group_name)


def _gathered_into_given_memory(rank: int, size: int, name: Any) -> None:
    everyone = [each + 1 for each in range(size) for _ in range(2)]
    summed = _functional.all_reduce(torch.full((2,), (rank + 1.0) / total(size)), "sum", name)
    for tensor, expected in (
        (torch.full((2,), rank + 1.0), everyone),
        (torch.full((2,), rank + 1), everyone),
        (AsyncCollectiveTensor(summed), [1] * 2 * size),
    ):
        whole = torch.zeros(2 * size, dtype=tensor.dtype)
        returned = _functional.all_gather_into_tensor_out(tensor, size, name, out=whole)
        assert returned.data_ptr() == whole.data_ptr()
        check(_wait(returned), expected)


@in_group
def one_after_another_on_gloo(rank: int, size: int) -> None:
    """A thread of Gloo drops the tensors of each call while the next one comes."""
    functional.install()
    gloo = dist.new_group(backend="gloo").group_name
    for step in range(500):
        whole = torch.zeros(2 * size)
        mine = torch.full((2,), float(step + rank))
        _wait(_functional.all_gather_into_tensor_out(mine, size, gloo, out=whole))
        check(whole, [step + each for each in range(size) for _ in range(2)])


def _messages_in_a_batch(rank: int, name: str) -> None:
    peer = rank ^ 1
    sent, got = torch.full((2, 4), rank + 1.0), torch.zeros(2, 4)
    results = _functional.batch_p2p_ops(
        ["isend", "irecv"] * 2, [peer] * 4, [1, 1, 2, 2], [sent[0], got[0], sent[1], got[1]], name
    )
    assert [result.numel() for result in results] == [0, 4, 0, 4]
    for result in results:
        _wait(result)
    check(got, torch.full((2, 4), peer + 1.0))


def _traced(rank: int, size: int, name: str) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(3 * size)
        gathered = _functional.all_gather_into_tensor_out(tensor * 2, size, name, out=whole)
        return _wait(gathered) + 1

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(3))
    check(
        graph(torch.full((3,), float(rank))), [2 * each + 1 for each in range(size) for _ in "123"]
    )


@in_group
def refused_batches(rank: int, size: int) -> list[str]:
    """Messages of batches that torch itself does not describe."""
    messages = []
    one = torch.ones(1)
    for kinds, peers in ((["isend"], [0, 1]), (["isend", "get"], [0, 1])):
        try:
            _functional.batch_p2p_ops(kinds, peers, [0, 0], [one, one], world().group_name)
        except RuntimeError as error:
            messages.append(str(error))
    return messages
