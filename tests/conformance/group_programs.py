"""Programs of ranks: sub-groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support.processes.rank_worker import GROUPS


def _total(group: allfold.Group, value: float) -> float:
    return float(group.all_reduce(np.full(3, value))[0])


def make(group: allfold.Group, members: Sequence[int], **options: Any) -> list[Any] | None:
    """A sub-group: its own rank, its size, who is in it; kept under the ranks' names.

    The ranks of the parent are gathered, so they show the order.
    """
    made = allfold.new_group(members, group=group, **options)
    if made is None:
        return None
    GROUPS[f"{group.name} {list(members)}"] = made
    ranks = made.all_gather(np.array([group.rank]))
    return [made.rank, made.world_size, ranks.tolist(), _total(made, group.rank)]


def use(group: allfold.Group, members: Sequence[int], value: float) -> float:
    """A sum in a sub-group that was made before."""
    return _total(GROUPS[f"{group.name} {list(members)}"], value)


def leave(group: allfold.Group, members: Sequence[int]) -> None:
    """Leave a sub-group; nothing else."""
    allfold.shutdown(GROUPS.pop(f"{group.name} {list(members)}"))


def again(group: allfold.Group, members: Sequence[int], times: int) -> list[list[float]] | None:
    """Sub-groups of the same ranks beside each other, with ops of all of them in flight."""
    made = [allfold.new_group(members, group=group) for _ in range(times)]
    groups = [each for each in made if each is not None]
    if not groups:
        return None
    assert len({each.name for each in groups}) == times
    buffers = [np.full(2, float(number + group.rank)) for number in range(times)]
    works = [
        each.all_reduce(buffer, async_op=True) for each, buffer in zip(groups, buffers, strict=True)
    ]
    for work in reversed(works):
        work.wait()
    for each in groups:
        allfold.shutdown(each)
    return [buffer.tolist() for buffer in buffers]


def interleaved(
    group: allfold.Group, all_members: Sequence[Sequence[int]], count: int, seed: int
) -> int:
    """Ops of several sub-groups and of their parent in flight, in an order of this rank's own."""
    dice = random.Random(seed + group.rank)
    made = [allfold.new_group(members, group=group) for members in all_members]
    groups = [group, *(each for each in made if each is not None)]
    sizes = {each.name: each.world_size for each in groups}
    calls = [each for each in groups for _ in range(count)]
    dice.shuffle(calls)
    numbers = dict.fromkeys(sizes, 0)
    works = []
    for each in calls:
        number = numbers[each.name]
        numbers[each.name] += 1
        tensor = np.full(5, number)
        works.append((each.all_reduce(tensor, async_op=True), tensor, number * sizes[each.name]))
    dice.shuffle(works)
    for work, tensor, right in works:
        work.wait()
        assert (tensor == right).all()
    for each in groups[1:]:
        allfold.shutdown(each)
    return len(works)


def amid_ops(group: allfold.Group, members: Sequence[int], count: int) -> float | None:
    """A sub-group that is made while ops of its parent are in flight."""
    tensors = [np.full(1000, number) for number in range(count)]
    works = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    made = allfold.new_group(members, group=group)
    total = None if made is None else _total(made, group.rank)
    for number, work in enumerate(works):
        work.wait()
        assert (tensors[number] == number * group.world_size).all()
    if made is not None:
        allfold.shutdown(made)
    return total


def nested(group: allfold.Group) -> list[int]:
    """Ever smaller groups, each of the former without its first rank, reversed; their sums."""
    current: allfold.Group | None = group
    made, sums = [], []
    while current is not None and current.world_size > 1:
        current = allfold.new_group(range(current.world_size - 1, 0, -1), group=current)
        if current is not None:
            made.append(current)
            sums.append(int(_total(current, group.rank)))
    for each in made:
        allfold.shutdown(each)
    return sums


def options_of(group: allfold.Group, members: Sequence[int], **options: Any) -> dict[str, Any]:
    """Describe a sub-group's own options, and its parent's timeout."""
    made = allfold.new_group(members, group=group, **options)
    assert made is not None
    found = {"timeout": made.timeout, "parent": group.timeout, "long": len(made.name) <= 128}
    allfold.shutdown(made)
    return found


def of_the_default(members: Sequence[int]) -> list[int] | None:
    """Without a parent it is a group of the first group of the process."""
    made = allfold.new_group(members)
    if made is None:
        return None
    found = [made.rank, made.world_size, allfold.rank(), allfold.rank(made)]
    allfold.shutdown(made)
    return found


def after_shutdown(group: allfold.Group, members: Sequence[int]) -> str:
    """Return the error of making a sub-group of a group that this process has left."""
    allfold.shutdown(GROUPS.pop(group.name))
    try:
        allfold.new_group(members, group=group, init_timeout=1.0)
    except AllfoldError as error:
        return type(error).__name__
    return "nothing"


def open_two_in_threads(group: allfold.Group, names: Sequence[str], timeout: float) -> list[float]:
    """Two groups of all ranks, each opened, used and left by a thread of its own, in this order."""

    def live(name: str) -> float:
        made = open_beside(group, name, timeout)
        total = _total(made, group.rank)
        allfold.shutdown(made)
        return total

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        begun = [pool.submit(live, name) for pool, name in ((first, names[0]), (second, names[1]))]
        return [each.result(2 * timeout) for each in begun]


def leave_and_open_in_threads(group: allfold.Group, name: str, timeout: float) -> list[float]:
    """Rank 0 leaves a group with an op in flight that the others call after another has opened."""
    old = open_beside(group, f"{name}-old", timeout)
    buffer = np.full(3, float(group.rank))
    with ThreadPoolExecutor(1) as pool:
        if group.rank == 0:
            work = old.all_reduce(buffer, async_op=True)
            leaving = pool.submit(allfold.shutdown, old)
        new = open_beside(group, f"{name}-new", timeout)
        total = _total(new, group.rank)
        if group.rank > 0:
            old.all_reduce(buffer)
            leaving = pool.submit(allfold.shutdown, old)
        leaving.result(timeout)
        if group.rank == 0:
            work.wait()
    allfold.shutdown(new)
    return [total, float(buffer[0])]


def open_beside(group: allfold.Group, name: str, timeout: float) -> allfold.Group:
    """Another group of the same ranks, by its name."""
    return allfold.init(
        rank=group.rank, world_size=group.world_size, group=name, init_timeout=timeout
    )
