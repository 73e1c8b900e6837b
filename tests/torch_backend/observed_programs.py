"""Collectives that something looks on at: modes of torch, tensor subclasses, traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch._subclasses import FakeTensorMode
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_backend.in_group import check, in_group, total, world


def _each_collective(rank: int, size: int) -> list[torch.Tensor]:
    """Call each one, and return the results."""
    one, root = torch.full((3,), rank + 1.0), 0
    blocks = [torch.zeros(3) for _ in range(size)]
    whole, integers = torch.zeros(3 * size), torch.full((2,), rank + 1)
    results: list[torch.Tensor] = []

    def keep(*tensors: torch.Tensor) -> None:
        results.extend(tensor.clone() for tensor in tensors)

    summed = one.clone()
    dist.all_reduce(summed)
    dist.all_reduce(integers, dist.ReduceOp.AVG, async_op=True).wait()
    scaled = one.clone()
    dist.all_reduce(scaled, _make_nccl_premul_sum(2.0))
    sent = one.clone()
    dist.broadcast(sent, root)
    at_root = one.clone()
    dist.reduce(at_root, root)
    keep(summed, integers, scaled, sent, *([at_root] if rank == root else []))
    dist.all_gather(blocks, one)
    keep(*blocks)
    dist.all_gather_into_tensor(whole, one)
    dist.gather(one, blocks if rank == root else None, root)
    keep(whole, *blocks)
    scattered, mine = torch.zeros(3), torch.zeros(3)
    dist.scatter(scattered, blocks if rank == root else None, root)
    dist.reduce_scatter(mine, [one] * size)
    keep(scattered, mine)
    dist.reduce_scatter_tensor(mine, whole)
    turned = torch.zeros(3 * size)
    dist.all_to_all_single(turned, whole)
    keep(mine, turned)
    dist.all_to_all(blocks, list(turned.chunk(size)))
    keep(*blocks)
    with _coalescing_manager():
        for tensor in (summed, sent):
            dist.all_reduce(tensor)
    keep(summed, sent)
    dist.barrier()
    world().barrier().wait()
    peer, got = rank ^ 1, torch.zeros(3)
    for receive in (lambda: dist.recv(got, peer), lambda: dist.recv(got)):
        sending = dist.isend(one, peer)
        receive()
        assert sending is not None
        sending.wait()
        keep(got)
    return results


class _Seen(TorchDispatchMode):
    """Notes the operators of collectives that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@in_group
def seen_by_a_mode(rank: int, size: int) -> list[str]:
    """All that is called comes through the mode, and gives what it gives without one."""
    plain = _each_collective(rank, size)
    with _Seen() as mode:
        seen = _each_collective(rank, size)
    check(seen, plain)
    check(_each_collective(rank, size), plain)
    names: list[str] = mode.names
    return names


@in_group
def beside_another_backend(rank: int, size: int) -> None:
    """Groups of other backends do as before, once operators know ours."""
    gloo = dist.new_group(backend="gloo")
    for _ in range(2):
        for group in (gloo, world()):
            tensor = torch.full((3,), rank + 1.0)
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
            check(tensor, [size] * 3)
            with CommDebugMode() as counts:
                dist.all_reduce(tensor, group=group)
            check(tensor, [size * size] * 3)
            assert counts.get_total_counts() == 1


@in_group
def traced(rank: int, size: int) -> None:
    """A graph has the collectives of a function, and does them."""

    def step(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        everyone = torch.zeros(3 * size)
        dist.all_gather_into_tensor(everyone, doubled)
        return everyone + 1

    expected = [2 * total(size) + 1] * 3 * size
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(step, tracing_mode=mode)(torch.zeros(3))
        called = [str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)]
        assert called == ["c10d.allreduce_.default", "c10d._allgather_base_.default"]
        for _ in range(2):
            check(graph(torch.full((3,), rank + 1.0)), expected)


@in_group
def without_memory(rank: int, size: int) -> None:
    """Tensors of FakeTensorMode have shapes, and nothing is sent."""
    kept = torch.full((4, 2), rank + 1.0)[:, 0]
    pending = dist.all_reduce(kept, async_op=True)
    with FakeTensorMode():
        tensor, whole = torch.zeros(3), torch.zeros(3 * size)
        if rank == 0:
            dist.all_reduce(tensor, async_op=True).wait()
            dist.all_gather_into_tensor(whole, tensor)
            dist.barrier()
        pending.wait()  # began before, with memory
        assert (tensor.shape, whole.shape) == ((3,), (3 * size,))
    check(kept, [total(size)] * 4)


@in_group
def of_subclasses(rank: int, size: int) -> None:
    """Results that nobody has waited for yet, as functional collectives return them."""
    one = torch.full((3,), rank + 1.0)
    calls: list[tuple[Callable[[torch.Tensor], Any], int]] = [
        (lambda tensor: dist.all_reduce(tensor), total(size) * size),
        (lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), total(size) * size),
        (lambda tensor: dist.broadcast(tensor, 0), total(size)),
    ]
    for call, expected in calls:
        summed = functional_collectives.all_reduce(one, "sum", world())
        assert type(summed) is functional_collectives.AsyncCollectiveTensor
        call(summed)
        check(summed + 0, [expected] * 3)
    blocks = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(blocks, functional_collectives.all_reduce(one, "sum", world()))
    check(blocks, [[total(size)] * 3] * size)


@in_group
def transformed(rank: int, size: int) -> None:
    """Transforms of ``torch.func`` see a collective, as with torch's own backends."""

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    check(torch.func.functionalize(scaled)(torch.full((3,), rank + 1.0)), [total(size)] * 3)
    try:
        torch.vmap(scaled)(torch.ones(2, 3))
    except RuntimeError as error:
        assert "Batching rule not implemented for c10d::allreduce_" in str(error)
    else:
        raise AssertionError("vmap saw no collective")
