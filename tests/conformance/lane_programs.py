"""Programs of ranks whose short ops go by the short lane between nodes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from allfold_core.operations import Kind


def was_posted(group: allfold.Group) -> bool:
    """Do a short op; return True if it was posted to the page, and was no message."""
    tensor = np.full(4, group.rank + 1.0)
    work = group.all_reduce(tensor, async_op=True)
    posted = type(work._pending).__name__ == "LaneOp"
    work.wait()
    assert (tensor == sum(range(1, group.world_size + 1))).all()
    return posted


def count_posted(group: allfold.Group, count: int, after: int = 0) -> int:
    """So many short ops, one after the other; how many were posted.

    Args:
        after: ops before these, which do not count. A lane that was closed opens after so many.
    """
    for _ in range(after):
        was_posted(group)
    return sum(was_posted(group) for _ in range(count))


def _inputs(group: allfold.Group, number: int, numel: int) -> list[Any]:
    """Return the input of each rank to an op, the same list on every rank."""
    draws = [np.random.default_rng([number, rank]) for rank in range(group.world_size)]
    return [draw.integers(-50, 50, numel).astype(np.float32) for draw in draws]


def all_kinds(group: allfold.Group, first: int, count: int, numel: int) -> int:
    """The four kinds that go by the lane, one after the other; how many results were right."""
    right = 0
    for number in range(first, first + count):
        brought = _inputs(group, number, numel + number % 7)
        tensor = brought[group.rank].copy()
        match number % 4:
            case 0:
                group.all_reduce(tensor)
                expected = np.sum(brought, axis=0)
            case 1:
                tensor = np.asarray(group.all_gather(tensor))
                expected = np.stack(brought)
            case 2:
                root = number // 4 % group.world_size
                group.broadcast(tensor, root)
                expected = brought[root]
            case _:
                group.barrier()
                expected = tensor.copy()
        assert np.array_equal(tensor.reshape(-1), expected.reshape(-1)), number
        right += 1
    return right


def short_and_long(group: allfold.Group, count: int) -> int:
    """Short ops, and between them those that do not fit a slot, or are to go another way."""
    for number in range(count):
        assert all_kinds(group, number, 1, 10) == 1
        match number % 4:
            case 0:
                tensor = np.full(100_000, group.rank + 1.0, np.float32)
                group.all_reduce(tensor)
                assert (tensor == sum(range(1, group.world_size + 1))).all()
            case 1:
                tensor = np.full(10, group.rank + 1.0, np.float32)
                group.all_reduce(tensor, strategy="ring")
                assert (tensor == sum(range(1, group.world_size + 1))).all()
            case 2:
                tensor = np.full(group.world_size, group.rank + 1.0, np.float32)
                found = group.reduce_scatter(tensor)
                assert (np.asarray(found) == sum(range(1, group.world_size + 1))).all()
    return count


def burst(group: allfold.Group, count: int) -> int:
    """More async ops than a rank has slots; how many results were right."""
    tensors = [np.full(5, number + group.rank, np.int64) for number in range(count)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    size = group.world_size
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert (tensor == number * size + sum(range(size))).all(), number
    return count


def burst_in_parts(group: allfold.Group, count: int) -> int:
    """A burst of ops of whose results each rank has a part; how many were right."""
    rank, size = group.rank, group.world_size
    own = np.arange(size, dtype=np.int64)
    everybody = np.stack([own + 10 * each for each in range(size)])
    right: list[Any] = []
    works: list[Any] = []
    for number in range(count):
        root = number % size
        match number % 5:
            case 0:
                works.append(group.reduce(own + 10 * rank, root, async_op=True))
                right.append(everybody.sum(0) if rank == root else None)
            case 1:
                works.append(group.gather(own + 10 * rank, root=root, async_op=True))
                right.append(everybody if rank == root else None)
            case 2:
                rows = everybody + number if rank == root else None
                out = np.empty(size, np.int64)
                works.append(group.scatter(out, rows, root=root, async_op=True))
                right.append(everybody[rank] + number)
            case 3:
                works.append(group.reduce_scatter(own + 10 * rank, async_op=True))
                right.append(everybody.sum(0)[rank : rank + 1])
            case _:
                works.append(group.all_to_all(own + 10 * rank, async_op=True))
                right.append(rank + 10 * np.arange(size))
    found = [work.wait() for work in works]
    same = (
        b is None or np.array_equal(np.asarray(a).ravel(), b.ravel())
        for a, b in zip(found, right, strict=True)
    )
    return sum(same)


def many_in_parts(group: allfold.Group, count: int) -> int:
    """So many results in parts, one after the other; how many were right."""
    own = np.arange(group.world_size, dtype=np.int64)
    right = group.world_size * group.rank
    return sum(int(group.reduce_scatter(own)[0]) == right for _ in range(count))


def same_bits(group: allfold.Group, numel: int, dtype: str) -> tuple[bool, bool]:
    """A sum of numbers that are not exact, in the short lane and in the long one.

    Args:
        numel: or as many as an op of the lane may have, which depends on the links.

    Returns:
        Whether the bits are the same; and whether the first op was posted, as on a busy machine it
        may be a message.
    """
    lane = group._channel._membership.epochs.lanes.of(group.epoch)
    assert lane is not None
    most = lane.recipes._rules.most_bytes[Kind.ALL_REDUCE]
    numel = min(numel, most // np.dtype(dtype).itemsize)
    values = np.random.default_rng(group.rank).normal(size=numel).astype(dtype)
    short, long = values.copy(), values.copy()
    work = group.all_reduce(short, async_op=True)
    posted = type(work._pending).__name__ == "LaneOp"
    work.wait()
    group.all_reduce(long, strategy="direct")
    return short.tobytes() == long.tobytes(), posted


def until_lost(group: allfold.Group, folder: str) -> dict[str, Any]:
    """Short ops until one fails: how many were done, and the error."""
    done = 0
    while True:
        tensor = np.full(6, 1.0)
        try:
            group.all_reduce(tensor)
        except AllfoldError as error:
            assert (tensor == 1.0).all(), "a failed op has changed the tensor"
            return {"done": done, "error": error.message, "code": error.code}
        assert (tensor == group.world_size).all()
        done += 1
        if done == 20:
            (Path(folder) / str(time.monotonic_ns())).touch()


def participants(group: allfold.Group, numel: int) -> list[int]:
    """One op: how many have taken part, and what the first element is."""
    tensor = np.ones(numel, np.float32)
    work = group.all_reduce(tensor, async_op=True)
    work.wait()
    return [work.participants, int(tensor[0])]
