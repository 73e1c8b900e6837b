"""Programs of ranks with tensors on a GPU, which is the fake one here.

A program returns what it found wrong, in words. Values are small whole numbers, so that every
result is exact, whatever the order of the fold; what is to be overwritten holds something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from cuda.bindings import driver

import allfold
from tests.support.fakes.fake_cuda.arrays import FakeTensor, check

POISON = 111

Array = np.ndarray[Any, np.dtype[Any]]


class Memory:
    """The memory of a rank's tensors.

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
        copy_on_device(made, host, to_host=False)
        return made

    def poisoned(self, shape: Any, dtype: Any = np.float32) -> Any:
        """A tensor to be overwritten."""
        return self.new(np.full(shape, POISON), dtype)


def values_of(tensor: Any) -> Array:
    """Return a tensor's present values."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, FakeTensor):
        return tensor.get()
    host = np.empty(tensor.shape, tensor.dtype)
    copy_on_device(tensor, host, to_host=True)
    return host


def copy_on_device(tensor: Any, host: Array, *, to_host: bool) -> None:
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


def wrong_in(what: str, tensor: Any, expected: Any) -> list[str]:
    found = values_of(tensor)
    expected = np.asarray(expected).astype(found.dtype)
    if found.shape == expected.shape and np.array_equal(found, expected):
        return []
    differ = np.flatnonzero(found.ravel() != expected.ravel())[:5].tolist()
    return [f"{what}: at {differ} {found.ravel()[differ]} instead of {expected.ravel()[differ]}"]


def given_by(rank: int, numel: int, low: int = 0, high: int = 7) -> Array:
    """Return a rank's input: every rank can work out that of all."""
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
        all_ = np.stack([given_by(rank, numel, 1, high) for rank in range(group.world_size)])
        tensor = memory.new(all_[group.rank], dtype)
        group.all_reduce(tensor, op)
        expected = all_.any(0) if (dtype, op) == ("bool", "sum") else _FOLDS[op](all_)
        wrong += wrong_in(f"{op} of {numel} {dtype}", tensor, expected)
    return wrong


def sum_of_pairs(group: allfold.Group, numel: int, given: Sequence[Sequence[float]]) -> Any:
    """The pairs that a sum has, each once, where every rank brings one pair again and again."""
    tensor = Memory(group).new(np.tile(given[group.rank], numel // 2))
    group.all_reduce(tensor)
    return np.unique(values_of(tensor).reshape(-1, 2), axis=0).tolist()


def premultiplied(group: allfold.Group, numel: int) -> list[str]:
    tensor = Memory(group).new(given_by(group.rank, numel))
    group.all_reduce(tensor, "premul_sum", factor=0.5)
    all_ = sum(given_by(rank, numel) for rank in range(group.world_size))
    return wrong_in("premul_sum", tensor, all_ / 2)


# Everything else


def collectives(
    group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1
) -> list[str]:
    """Every collective once, with as many elements per rank."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    root = world - 1
    mine = given_by(me, numel)
    all_ = [given_by(rank, numel) for rank in range(world)]
    wide = [given_by(rank + 77, numel * world) for rank in range(world)]
    total = np.sum(wide, 0)
    wrong: list[str] = []

    tensor = memory.new(mine)
    group.reduce(tensor, root)
    wrong += wrong_in("reduce", tensor, sum(all_) if me == root else mine)

    tensor = memory.new(mine) if me == root else memory.poisoned(numel)
    group.broadcast(tensor, root)
    wrong += wrong_in("broadcast", tensor, all_[root])

    output = memory.poisoned(numel * world)
    group.all_gather(memory.new(mine), output)
    wrong += wrong_in("all_gather", output, np.concatenate(all_))

    output = memory.poisoned(numel * world) if me == root else None
    group.gather(memory.new(mine), root, output)
    if output is not None:
        wrong += wrong_in("gather", output, np.concatenate(all_))

    output = memory.poisoned(numel)
    group.scatter(output, memory.new(np.concatenate(all_)) if me == root else None, root)
    wrong += wrong_in("scatter", output, mine)

    output = memory.poisoned(numel)
    group.reduce_scatter(memory.new(wide[me]), output)
    wrong += wrong_in("reduce_scatter", output, total[me * numel : (me + 1) * numel])

    output = memory.poisoned(numel * world)
    group.all_to_all(memory.new(wide[me]), output)
    blocks = [wide[rank][me * numel : (me + 1) * numel] for rank in range(world)]
    wrong += wrong_in("all_to_all", output, np.concatenate(blocks))

    both = [memory.new(mine), memory.new(2 * mine)]
    group.all_reduce(both)
    for each, factor in zip(both, (1, 2), strict=True):
        wrong += wrong_in("all_reduce of a list", each, factor * sum(all_))
    return wrong


def uneven(group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1) -> list[str]:
    """Blocks of different sizes; one of them is empty."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    counts = [numel * rank + (rank > 0) for rank in range(world)]
    bounds = [0, *accumulate(counts)]
    all_ = [given_by(rank, count) for rank, count in enumerate(counts)]
    wide = [given_by(rank + 77, sum(counts)) for rank in range(world)]
    wrong: list[str] = []

    output = memory.poisoned(sum(counts))
    group.all_gather(memory.new(all_[me]), output, counts=counts)
    wrong += wrong_in("all_gather", output, np.concatenate(all_))

    output = memory.poisoned(counts[me])
    group.reduce_scatter(memory.new(wide[me]), output, counts=counts)
    wrong += wrong_in("reduce_scatter", output, np.sum(wide, 0)[bounds[me] : bounds[me + 1]])

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
    wrong += wrong_in("all_to_all", output, np.concatenate(expected))
    return wrong


def messages(group: allfold.Group, numel: int, place: str = "gpu", devices: int = 1) -> list[str]:
    """Every rank sends to the next one; twice, to see that the order stays."""
    memory = Memory(group, place, devices)
    me, world = group.rank, group.world_size
    before = (me - 1) % world
    works, outputs = [], []
    for turn in (1, 2):
        sent = memory.new(turn * given_by(me, numel))
        works.append(group.send(sent, (me + 1) % world, async_op=True))
        outputs.append(memory.poisoned(numel))
        works.append(group.recv(outputs[-1], before, async_op=True))
    for work in works:
        work.wait()
    return [
        each
        for turn, output in zip((1, 2), outputs, strict=True)
        for each in wrong_in(f"message {turn}", output, turn * given_by(before, numel))
    ]


# In what order things happen


def many_at_once(group: allfold.Group, numel: int, count: int) -> list[str]:
    """Ops that are waited for in the end, with memory of the arena that is used again and again."""
    memory = Memory(group)
    tensors = [memory.new(given_by(group.rank + each, numel)) for each in range(count)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    wrong: list[str] = []
    for each, tensor in enumerate(tensors):
        expected = sum(given_by(rank + each, numel) for rank in range(group.world_size))
        wrong += wrong_in(f"op {each}", tensor, expected)
    return wrong


def chain(group: allfold.Group, numel: int, steps: int) -> list[str]:
    """Reduce one op's result in the next, without anybody waiting for the GPU."""
    tensor = Memory(group).new(np.ones(numel))
    for _ in range(steps):
        group.all_reduce(tensor)
    return wrong_in("chain", tensor, np.full(numel, float(group.world_size) ** steps))


def behind_other_work(group: allfold.Group, numel: int) -> list[str]:
    """A call comes after what its tensor's stream was given before, though that is not yet done."""
    memory = Memory(group)
    tensor, later = memory.poisoned(numel), memory.new(given_by(group.rank, numel))
    with tensor.current():
        for _ in range(20):  # each takes its time
            check(driver.cuMemsetD8Async(tensor.address, 1, tensor.nbytes, tensor.stream))
        check(driver.cuMemcpyAsync(tensor.address, later.address, tensor.nbytes, tensor.stream))
    group.all_reduce(tensor)
    copy = memory.poisoned(numel)
    with tensor.current():  # on the same stream, and without waiting
        check(driver.cuMemcpyAsync(copy.address, tensor.address, tensor.nbytes, tensor.stream))
        check(driver.cuStreamSynchronize(tensor.stream))
    total = sum(given_by(rank, numel) for rank in range(group.world_size))
    return wrong_in("all_reduce", tensor, total) + wrong_in("what came after it", copy, total)
