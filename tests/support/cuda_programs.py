"""What ranks do with tensors on a GPU, which is the fake one here.

A program returns what it found wrong, in words. Values are small whole numbers, so that every
result is exact, whatever the order of the fold; what is to be overwritten holds something else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from cuda.bindings import driver
from tests.support.fake_cuda.arrays import FakeTensor, check

import allfold
from allfold_core.errors import AllfoldError

POISON = 111

Array = np.ndarray[Any, np.dtype[Any]]


class Memory:
    """Where a rank has its tensors.

    Args:
        place: ``"gpu"``, ``"arena"`` (the one on the GPU), ``"cpu"``; or ``"mixed"``: every other
            rank has a GPU.
        devices: GPUs of the machine; ranks take turns, from the second one on.
    """

    def __init__(self, group: allfold.Group, place: str = "gpu", devices: int = 1) -> None:
        self.group = group
        self.place = ("cpu", "gpu")[group.rank % 2] if place == "mixed" else place
        self.device = (group.rank + 1) % devices

    def new(self, values: Any, dtype: Any = np.float32) -> Any:
        """A tensor with these values."""
        host = np.array(values, dtype)
        if self.place == "cpu":
            return host
        if self.place == "gpu":
            return FakeTensor(host.shape, host.dtype, self.device, own_stream=True).put(host)
        made = self.group.empty(host.shape, host.dtype, device=f"cuda:{self.device}")
        _on_device(made, host, to_host=False)
        return made

    def poisoned(self, shape: Any, dtype: Any = np.float32) -> Any:
        """A tensor to be overwritten."""
        return self.new(np.full(shape, POISON), dtype)


def values_of(tensor: Any) -> Array:
    """What a tensor holds by now."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, FakeTensor):
        return tensor.get()
    host = np.empty(tensor.shape, tensor.dtype)
    _on_device(tensor, host, to_host=True)
    return host


def _on_device(tensor: Any, host: Array, *, to_host: bool) -> None:
    about = tensor.__cuda_array_interface__
    address, ordinal = about["data"][0], 0
    if not host.nbytes:
        return
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal))))
    check(driver.cuCtxPushCurrent(context))
    try:
        if to_host:
            check(driver.cuMemcpyDtoH(host.ctypes.data, address, host.nbytes))
        else:
            check(driver.cuMemcpyHtoD(address, host.ctypes.data, host.nbytes))
    finally:
        check(driver.cuCtxPopCurrent())


def _wrong(what: str, tensor: Any, expected: Any) -> list[str]:
    found = values_of(tensor)
    expected = np.asarray(expected).astype(found.dtype)
    if found.shape == expected.shape and np.array_equal(found, expected):
        return []
    differ = np.flatnonzero(found.ravel() != expected.ravel())[:5].tolist()
    return [f"{what}: at {differ} {found.ravel()[differ]} instead of {expected.ravel()[differ]}"]


def _given(rank: int, numel: int, low: int = 0, high: int = 7) -> Array:
    """What a rank brings: every rank can work out that of all."""
    return np.random.default_rng(1000 * numel + rank).integers(low, high, numel)


# Reductions

_FOLDS: dict[str, Callable[[Array], Any]] = {
    "sum": lambda all_: all_.sum(0),
    "mean": lambda all_: all_.sum(0) / len(all_),
    "product": lambda all_: all_.prod(0),
    "min": lambda all_: all_.min(0),
    "max": lambda all_: all_.max(0),
    "band": lambda all_: np.bitwise_and.reduce(all_, 0),
    "bor": lambda all_: np.bitwise_or.reduce(all_, 0),
    "bxor": lambda all_: np.bitwise_xor.reduce(all_, 0),
}


def all_reduces(
    group: allfold.Group,
    numel: int,
    cases: Sequence[Sequence[str]],
    place: str = "gpu",
    devices: int = 1,
) -> list[str]:
    """One for each (dtype, op). A world size that is a power of two makes a mean exact."""
    memory, wrong = Memory(group, place, devices), []
    for dtype, op in cases:
        high = 3 if op == "product" else 2 if dtype == "bool" else 7
        all_ = np.stack([_given(rank, numel, 1, high) for rank in range(group.world_size)])
        tensor = memory.new(all_[group.rank], dtype)
        group.all_reduce(tensor, op)
        expected = all_.any(0) if (dtype, op) == ("bool", "sum") else _FOLDS[op](all_)
        wrong += _wrong(f"{op} of {numel} {dtype}", tensor, expected)
    return wrong


def premultiplied(group: allfold.Group, numel: int) -> list[str]:
    tensor = Memory(group).new(_given(group.rank, numel))
    group.all_reduce(tensor, "premul_sum", factor=0.5)
    all_ = sum(_given(rank, numel) for rank in range(group.world_size))
    return _wrong("premul_sum", tensor, all_ / 2)


# Everything else


def collectives(
    group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1
) -> list[str]:
    """Every collective once, with as many elements per rank."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    root = world - 1
    mine = _given(me, numel)
    all_ = [_given(rank, numel) for rank in range(world)]
    wide = [_given(rank + 77, numel * world) for rank in range(world)]
    total = np.sum(wide, 0)
    wrong: list[str] = []

    tensor = memory.new(mine)
    group.reduce(tensor, root)
    wrong += _wrong("reduce", tensor, sum(all_) if me == root else mine)

    tensor = memory.new(mine) if me == root else memory.poisoned(numel)
    group.broadcast(tensor, root)
    wrong += _wrong("broadcast", tensor, all_[root])

    output = memory.poisoned(numel * world)
    group.all_gather(memory.new(mine), output)
    wrong += _wrong("all_gather", output, np.concatenate(all_))

    output = memory.poisoned(numel * world) if me == root else None
    group.gather(memory.new(mine), root, output)
    if output is not None:
        wrong += _wrong("gather", output, np.concatenate(all_))

    output = memory.poisoned(numel)
    group.scatter(output, memory.new(np.concatenate(all_)) if me == root else None, root)
    wrong += _wrong("scatter", output, mine)

    output = memory.poisoned(numel)
    group.reduce_scatter(memory.new(wide[me]), output)
    wrong += _wrong("reduce_scatter", output, total[me * numel : (me + 1) * numel])

    output = memory.poisoned(numel * world)
    group.all_to_all(memory.new(wide[me]), output)
    blocks = [wide[rank][me * numel : (me + 1) * numel] for rank in range(world)]
    wrong += _wrong("all_to_all", output, np.concatenate(blocks))

    both = [memory.new(mine), memory.new(2 * mine)]
    group.all_reduce(both)
    for each, factor in zip(both, (1, 2), strict=True):
        wrong += _wrong("all_reduce of a list", each, factor * sum(all_))
    return wrong


def uneven(group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1) -> list[str]:
    """Blocks of different sizes; one of them is empty."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    counts = [numel * rank + (rank > 0) for rank in range(world)]
    bounds = [0, *accumulate(counts)]
    all_ = [_given(rank, count) for rank, count in enumerate(counts)]
    wide = [_given(rank + 77, sum(counts)) for rank in range(world)]
    wrong: list[str] = []

    output = memory.poisoned(sum(counts))
    group.all_gather(memory.new(all_[me]), output, counts=counts)
    wrong += _wrong("all_gather", output, np.concatenate(all_))

    output = memory.poisoned(counts[me])
    group.reduce_scatter(memory.new(wide[me]), output, counts=counts)
    wrong += _wrong("reduce_scatter", output, np.sum(wide, 0)[bounds[me] : bounds[me + 1]])

    # Rank i sends (i + j) % world rows to rank j.
    rows = [[(i + j) % world for j in range(world)] for i in range(world)]
    sent = [np.arange(sum(rows[i])) + 100 * i for i in range(world)]
    output = memory.poisoned(sum(rows[i][me] for i in range(world)))
    group.all_to_all(
        memory.new(sent[me]),
        output,
        send_counts=rows[me],
        receive_counts=[rows[i][me] for i in range(world)],
    )
    expected = [sent[i][sum(rows[i][:me]) : sum(rows[i][: me + 1])] for i in range(world)]
    wrong += _wrong("all_to_all", output, np.concatenate(expected))
    return wrong


def messages(group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1) -> list[str]:
    """Every rank sends to the next one; twice, to see that the order stays."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    before = (me - 1) % world
    works, outputs = [], []
    for turn in (1, 2):
        sent = memory.new(turn * _given(me, numel))
        works.append(group.send(sent, (me + 1) % world, async_op=True))
        outputs.append(memory.poisoned(numel))
        works.append(group.recv(outputs[-1], before, async_op=True))
    for work in works:
        work.wait()
    return [
        each
        for turn, output in zip((1, 2), outputs, strict=True)
        for each in _wrong(f"message {turn}", output, turn * _given(before, numel))
    ]


# In what order things happen


def many_at_once(group: allfold.Group, numel: int, count: int) -> list[str]:
    """Ops that are waited for in the end, with memory of the arena that is used again and again."""
    memory = Memory(group)
    tensors = [memory.new(_given(group.rank + each, numel)) for each in range(count)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    wrong: list[str] = []
    for each, tensor in enumerate(tensors):
        expected = sum(_given(rank + each, numel) for rank in range(group.world_size))
        wrong += _wrong(f"op {each}", tensor, expected)
    return wrong


def chain(group: allfold.Group, numel: int, steps: int) -> list[str]:
    """What one op leaves is the input of the next, without anybody waiting for the GPU."""
    tensor = Memory(group).new(np.ones(numel))
    for _ in range(steps):
        group.all_reduce(tensor)
    return _wrong("chain", tensor, np.full(numel, float(group.world_size) ** steps))


def behind_other_work(group: allfold.Group, numel: int) -> list[str]:
    """A call comes after what its tensor's stream was given before, though that is not yet done."""
    memory = Memory(group)
    tensor, later = memory.poisoned(numel), memory.new(_given(group.rank, numel))
    with tensor.current():
        for _ in range(20):  # each takes its time
            check(driver.cuMemsetD8Async(tensor.address, 1, tensor.nbytes, tensor.stream))
        check(driver.cuMemcpyAsync(tensor.address, later.address, tensor.nbytes, tensor.stream))
    group.all_reduce(tensor)
    copy = memory.poisoned(numel)
    with tensor.current():  # on the same stream, and without waiting
        check(driver.cuMemcpyAsync(copy.address, tensor.address, tensor.nbytes, tensor.stream))
        check(driver.cuStreamSynchronize(tensor.stream))
    total = sum(_given(rank, numel) for rank in range(group.world_size))
    return _wrong("all_reduce", tensor, total) + _wrong("what came after it", copy, total)


# What can go wrong


def refused(group: allfold.Group, what: str) -> str:
    """What the error says of tensors that cannot be."""
    memory = Memory(group)
    tensor = memory.new(np.ones((4, 4)))
    try:
        if what == "two places":
            group.all_gather(tensor, np.zeros((4 * group.world_size, 4), np.float32))
        elif what == "strides":
            group.all_reduce(Strided(tensor))
        elif what == "read-only":
            group.all_reduce(Strided(tensor, contiguous=True))
        else:
            group.empty(4, device=what)
    except AllfoldError as error:
        return str(error)
    return "nothing"


class Strided:
    """Every other column of a tensor, or all of it but not to be written."""

    def __init__(self, tensor: FakeTensor, contiguous: bool = False) -> None:
        about = dict(tensor.__cuda_array_interface__)
        if contiguous:
            about["data"] = (about["data"][0], True)
        else:
            about |= {"shape": (4, 2), "strides": (16, 8)}
        self._tensor = tensor
        self.__cuda_array_interface__ = about


_arrays: list[Any] = []


def keep_array(group: allfold.Group) -> bool:
    """Have memory on the GPU that the agent has open, as long as this process lives."""
    _arrays.append(group.empty(64, device="cuda:0"))
    return len(_arrays) == 1


def hang(group: allfold.Group, timeout: float) -> str:
    """What comes of an op where a GPU does nothing any more."""
    try:
        group.all_reduce(FakeTensor(64, own_stream=True), timeout=timeout)
    except AllfoldError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


def die_in_flight(group: allfold.Group, numel: int) -> None:
    """Call the op of :func:`all_reduces` for a sum, and end at once."""
    group.all_reduce(Memory(group).new(_given(group.rank, numel, 1)), async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)


def path(group: allfold.Group) -> str:
    """Which way the tensors of this rank take."""
    gpu = group.membership.session.gpu(0)
    return f"{gpu.path.value}: {gpu.why}"


def show_log() -> None:
    """Have Allfold's lines in the log of this process."""
    logging.basicConfig(level=logging.INFO)


# A GPU that is late


def _keep_busy(tensor: FakeTensor, rounds: int) -> None:
    """Give a tensor's stream work, each piece of which takes its time."""
    with tensor.current():
        for _ in range(rounds):
            check(driver.cuMemsetD8Async(tensor.address, 0, tensor.nbytes, tensor.stream))


def _outcome(group: allfold.Group, tensor: FakeTensor, timeout: float) -> str:
    try:
        group.all_reduce(tensor, timeout=timeout)
    except AllfoldError as error:
        return f"{type(error).__name__}: {error.message}"
    return "done"


def late_for_one(group: allfold.Group) -> list[str]:
    """What becomes of three ops where the GPU of rank 0 is too late for the second."""
    tensor = FakeTensor(64, own_stream=True).put(1)
    said = [_outcome(group, tensor, 10.0)]
    if group.rank == 0:
        _keep_busy(tensor, 40)
    said.append(_outcome(group, tensor, 0.4 if group.rank == 0 else 10.0))
    if group.rank == 0:
        with tensor.current():
            check(driver.cuStreamSynchronize(tensor.stream))
    said.append(_outcome(group, tensor, 10.0))
    return said


def late_but_in_time(group: allfold.Group, timeout: float, rounds: int) -> str:
    """What becomes of an op for which one rank's GPU is ready when most of its time is over."""
    tensor = FakeTensor(64, own_stream=True).put(1)
    group.all_reduce(tensor, timeout=20.0)
    if group.rank == 0:
        _keep_busy(tensor, rounds)
    return _outcome(group, tensor, timeout)


def memory_after(group: allfold.Group, numel: int, fails: bool) -> list[str]:
    """Memory for a new array is nobody else's, whatever is still on its way through the arena.

    Either a copy into it, for an op that has failed, or one out of it, behind another op.
    """
    done, late = (FakeTensor(numel, own_stream=True).put(1) for _ in range(2))
    group.all_reduce(done, timeout=20.0)
    done.put(1)
    first = group.all_reduce(done, async_op=True, timeout=20.0)
    first.is_completed()
    _keep_busy(late, 12)
    second = group.all_reduce(late, async_op=True, timeout=0.2 if fails else 20.0)
    first.wait()
    if fails:
        with contextlib.suppress(AllfoldError):
            second.wait()
    fresh = group.empty(numel, np.float32, device="cuda:0")
    _on_device(fresh, np.full(numel, 5, np.float32), to_host=False)
    if not fails:
        second.wait()
    with late.current():
        check(driver.cuStreamSynchronize(late.stream))
    group.barrier()
    wrong = _wrong("the first op", done, np.full(numel, group.world_size))
    return wrong + _wrong("the new array", fresh, np.full(numel, 5))
