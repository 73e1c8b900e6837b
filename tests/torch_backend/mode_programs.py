"""Collectives in the modes that a script may set: none of them changes what is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import allfold
from allfold.torch import ElasticSampler
from tests.torch_backend.in_group import check, in_group, total, world


class _OperatorsRefused(TorchDispatchMode):
    """Refuses every operator but those of collectives."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "c10d", f"{func} was called in a mode of the script"
        return func(*args, **(kwargs or {}))


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], Any]] = {
    "default_device": lambda: _default_device("meta"),
    "default_dtype": lambda: _default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "one_thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "operators": _OperatorsRefused,
}


def _tensors(rank: int, size: int) -> list[tuple[torch.Tensor, list[float]]]:
    """Tensors of several kinds, and their means over the ranks."""
    mean = total(size) / size
    strided = torch.zeros(3, 2, device="cpu")[:, 0]
    strided += rank + 1
    return [
        (torch.full((3,), rank + 1.0, device="cpu"), [mean] * 3),
        (torch.full((3,), rank + 1, device="cpu"), [int(mean)] * 3),
        (torch.full((3,), rank + 1.0, dtype=torch.bfloat16, device="cpu"), [mean] * 3),
        (strided, [mean] * 3),
    ]


@in_group
def reduced_in(rank: int, size: int, modes: list[str]) -> None:
    """An op that is called, waited for, or both, in these modes."""
    with ExitStack() as inference:
        if "inference" in modes:  # such tensors cannot be changed outside
            inference.enter_context(torch.inference_mode())
        _reduce_in(rank, size, modes)


def _reduce_in(rank: int, size: int, modes: list[str]) -> None:
    def all_modes() -> ExitStack:
        stack = ExitStack()
        for mode in modes:
            stack.enter_context(MODES[mode]())
        return stack

    for call_inside, wait_inside in ((True, True), (True, False), (False, True)):
        for tensor, expected in _tensors(rank, size):
            with all_modes() if call_inside else ExitStack():
                work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
            with all_modes() if wait_inside else ExitStack():
                assert work is not None
                work.wait()
            check(tensor, expected)


@in_group
def means_of_inference(rank: int, size: int) -> None:
    """Such tensors may only be written in inference mode, whoever copies the result out."""
    with torch.inference_mode():
        given = _tensors(rank, size)
        works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True) for tensor, _ in given]
    for work, (tensor, expected) in zip(works, given, strict=True):
        check(work.get_future().wait()[0], expected)
        check(tensor, expected)


@in_group
def everything_else(rank: int, size: int) -> None:
    """Objects, trainings, states and samples, while new tensors are meta ones by default."""
    with _default_dtype(torch.float64), _default_device("meta"):
        gathered: list[Any] = [None] * size
        with torch.device("cpu"):
            dist.all_gather_object(gathered, {"rank": rank})
            network = nn.Linear(2, 1)
        assert gathered == [{"rank": each} for each in range(size)]
        model = DistributedDataParallel(network)
        model(torch.full((1, 2), rank + 1.0, device="cpu")).sum().backward()
        assert network.weight.grad is not None
        assert network.weight.grad.tolist() == [[total(size) / size] * 2]
        summed = all_reduce(torch.ones(2, device="cpu"), "sum", world())
        assert (summed + 0).numpy().tolist() == [size] * 2
        assert len(ElasticSampler(range(8), 4).plan(0).indices) == 4 // size
        group = allfold.init(rank=rank, world_size=size, group="in-modes")
        momentum = {"momentum": torch.ones(2, device="cpu")} if rank == 0 else {}
        held = allfold.State(values=momentum)
        held.sync()
        assert held.values["momentum"].tolist() == [1.0, 1.0]
        for _ in range(3):  # later calls of a kind are made from the first
            output = group.all_gather(torch.full((2,), float(rank), device="cpu"))
            assert output.tolist() == [float(each) for each in range(size) for _ in range(2)]
        assert group.empty((2, 2), torch.float32).is_cpu
        allfold.shutdown(group)
