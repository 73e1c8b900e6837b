"""Programs of ranks: point-to-point messages."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import allfold
from allfold_core.errors import AllfoldError
from tests.support import tensors
from tests.support.processes.rank_worker import GROUPS

_LARGE = 1 << 20

# One message


def send(
    group: allfold.Group,
    to: int,
    values: Sequence[float] = (1, 2, 3),
    *,
    dtype: str = "float32",
    torch: bool = False,
    delay: float = 0.0,
    **options: Any,
) -> None:
    """Send small integers."""
    time.sleep(delay)
    tensor = tensors.from_integers(np.array(values, np.int64), dtype, torch=torch)
    group.send(tensor, to, **options)


def receive(
    group: allfold.Group,
    source: int | None = None,
    numel: int = 3,
    *,
    dtype: str = "float32",
    torch: bool = False,
    delay: float = 0.0,
    **options: Any,
) -> list[Any]:
    """Return a message's source and content. If the receive fails, the tensor is unchanged."""
    time.sleep(delay)
    tensor = tensors.from_integers(np.full(numel, 77), dtype, torch=torch)
    before = tensors.to_bytes(tensor)
    try:
        return [group.recv(tensor, source, **options), tensors.to_list(tensor)]
    except AllfoldError:
        assert tensors.to_bytes(tensor) == before, "a failed receive has changed the tensor"
        raise


def pending(group: allfold.Group, kind: str, peer: int, numel: int) -> None:
    """A message and then an op; only the message is waited for.

    The agent reads what a rank calls in order: when it knows the op, it knows the message.
    """
    work = getattr(group, kind)(np.ones(numel, np.float32), peer, async_op=True)
    group.barrier(async_op=True)
    work.wait()


def type_of_received(group: allfold.Group, source: int, dtype: str) -> list[Any]:
    """Return a message's source and its numbers, received into a torch tensor of a type."""
    tensor = tensors.from_integers(np.zeros(3, np.int64), dtype, torch=True)
    return [group.recv(tensor, source), [float(value.real) for value in tensor.tolist()]]


def refused(group: allfold.Group, what: str) -> None:
    """A message that cannot be, of this rank alone."""
    values = np.ones(3, np.float32)
    match what:
        case "to itself":
            group.send(values, group.rank)
        case "from itself":
            group.recv(values, group.rank)
        case "to a rank beyond the group":
            group.send(values, group.world_size)
        case "from a negative rank":
            group.recv(values, -1)
        case "a tag of 64 bits":
            group.send(values, 1 - group.rank, tag=1 << 63)
        case "a tag that is no number":
            group.recv(values, tag="x")  # type: ignore[arg-type]
        case "a number":
            group.send(3.0, 1 - group.rank)
        case "into a read-only array":
            values.flags.writeable = False
            group.recv(values, 1 - group.rank)
        case "no time":
            group.recv(values, 1 - group.rank, timeout=0)
        case _:
            raise ValueError(what)


# Between all pairs


def _content(source: int, target: int, number: int, nbytes: int) -> Any:
    return np.random.default_rng([source, target, number]).integers(0, 256, nbytes, np.uint8)


def all_pairs(group: allfold.Group, sizes: Sequence[int], arena: bool) -> int:
    """Messages of so many bytes between all pairs, both ways, all in flight; how many came."""
    me, others = group.rank, [rank for rank in range(group.world_size) if rank != group.rank]
    works, received = [], []
    for number, nbytes in enumerate(sizes):
        for peer in others:
            target = group.empty(nbytes, np.uint8) if arena else np.empty(nbytes, np.uint8)
            received.append((peer, number, nbytes, target))
            works.append(group.recv(target, peer, async_op=True))
            tensor = _content(me, peer, number, nbytes)
            works.append(
                group.send(
                    tensors.in_arena(tensor, group) if arena else tensor, peer, async_op=True
                )
            )
    for work in works:
        work.wait()
    for peer, number, nbytes, target in received:
        assert (target == _content(peer, me, number, nbytes)).all(), (peer, number, nbytes)
    return len(received)


def storm(group: allfold.Group, count: int, seed: int, ops: int = 0) -> int:
    """So many small messages to every other rank and from it, and collectives among them.

    The receives name their source or take any, in an order of this rank's own; under one tag
    everything comes in the order in which it was sent.
    """
    dice = random.Random(seed + group.rank)
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    sends = [(peer, number) for number in range(count) for peer in others]
    works, named, anyone = [], [], []
    reductions: list[tuple[allfold.Work, int]] = []
    for position, (peer, number) in enumerate(sends):
        value = np.array([group.rank, number], np.int32)
        works.append(group.send(value, peer, tag=number % 2, async_op=True))
        if number % 2:
            buffer = np.empty(2, np.int32)
            works.append(group.recv(buffer, tag=1, async_op=True))
            anyone.append((works[-1], buffer))
        if position % max(1, len(sends) // max(1, ops)) == 0 and len(reductions) < ops:
            reductions.append((group.all_reduce(np.full(100, position), async_op=True), position))
    for peer in dice.sample(others, len(others)):
        for number in range(0, count, 2):
            buffer = np.empty(2, np.int32)
            works.append(group.recv(buffer, peer, tag=0, async_op=True))
            named.append((peer, number, buffer))
    for work in dice.sample(works, len(works)):
        work.wait()
    for peer, number, buffer in named:
        assert buffer.tolist() == [peer, number]
    expected = {peer: iter(range(1, count, 2)) for peer in others}
    for work, buffer in anyone:
        source = work.wait()
        assert buffer.tolist() == [source, next(expected[source])]
    for work, position in reductions:
        assert (work.wait() == position * group.world_size).all()
    return len(named) + len(anyone)


def by_tags(group: allfold.Group, tags: Sequence[int], order: Sequence[int]) -> list[float] | None:
    """Rank 0 sends a message per tag; the last rank receives them by tag, in another order."""
    last = group.world_size - 1
    if group.rank == 0:
        works = [
            group.send(np.array([float(number)]), last, tag=tag, async_op=True)
            for number, tag in enumerate(tags)
        ]
        for work in works:
            work.wait()
        return None
    if group.rank != last:
        return None
    got = np.zeros((len(order), 1))
    for number, tag in enumerate(order):
        assert group.recv(got[number], 0, tag=tag) == 0
    return tensors.to_list(got)


def ring(group: allfold.Group, numel: int, rounds: int) -> float:
    """Everybody sends to the next rank before it receives: that must not block. The sum."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    value, total = np.full(numel, float(group.rank)), 0.0
    for _ in range(rounds):
        got = np.empty(numel)
        work = group.send(value, after, async_op=True)
        assert group.recv(got, before) == before
        work.wait()
        assert (got == got[0]).all()
        total += got[0]
        value = got
    return total


def strided(group: allfold.Group, torch: bool) -> list[float] | None:
    """Every second column of a matrix, into every second one of another."""
    base = tensors.from_integers(np.zeros((3, 8), np.int64), "float32", torch=torch)
    if group.rank == 0:
        base[...] = tensors.from_integers(np.arange(24).reshape(3, 8), "float32", torch=torch)
        group.send(base[:, ::2], 1)
        return None
    if group.rank == 1:
        group.recv(base[:, 1::2], 0)
        return tensors.to_list(base)
    return None


def amid_ops(group: allfold.Group, ops: int) -> bool:
    """A large message that is received only after many ops, which it must not hold up."""
    last = group.world_size - 1
    tensor = np.full(_LARGE, 5.0) if group.rank == 0 else np.zeros(_LARGE)
    work = group.send(tensor, last, async_op=True) if group.rank == 0 else None
    for number in range(ops):
        assert (group.all_reduce(np.full(10, number)) == number * group.world_size).all()
    if group.rank == last:
        work = group.recv(tensor, 0, async_op=True)
    for number in range(ops):
        assert (group.all_reduce(np.full(10, number)) == number * group.world_size).all()
    if work is not None:
        work.wait()
    return bool((tensor == 5.0).all()) == (group.rank in (0, last))


def in_sub_group(group: allfold.Group, members: Sequence[int]) -> list[Any] | None:
    """The same tag in a group and in a sub-group of it: messages stay where they belong."""
    made = allfold.new_group(members, group=group)
    if made is None:
        return None
    found: list[Any] = []
    first, last = members[0], members[-1]
    if group.rank == first:
        works = [
            group.send(np.array([10.0]), last, async_op=True),
            made.send(np.array([20.0]), len(members) - 1, async_op=True),
        ]
        found = [work.wait() for work in works]
    if group.rank == last:
        for each in (made, group):
            buffer = np.zeros(1)
            found.append([each.recv(buffer), buffer.tolist()])
    allfold.shutdown(made)
    return found


def leave(group: allfold.Group, delay: float = 0.0) -> None:
    """Leave in order."""
    time.sleep(delay)
    allfold.shutdown(GROUPS.pop(group.name))


def send_and_leave(group: allfold.Group, to: int, numel: int) -> None:
    """Start a message and leave: it is delivered first."""
    group.send(np.full(numel, 3.0), to, async_op=True)
    leave(group)
