"""The collectives that ``allfold bench`` measures: how each is called and checked.

Sizes are those of nccl-tests: of the tensor for all-reduce, reduce and broadcast, of all blocks
together for the others. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import allfold
from allfold.cli._bench.data import Array, Bench, Share


def _whole(share: Share) -> int:
    return share.count


def _block(share: Share) -> int:
    return share.block


def _same(_: int) -> float:
    """A link carries as many bytes as the size says."""
    return 1.0


def _without_own(world: int) -> float:
    """Every rank has its own block already."""
    return (world - 1) / world


def _twice_without_own(world: int) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * (world - 1) / world


@dataclass(frozen=True)
class BenchKind:
    """One collective: its call, its tensors and its expected result.

    Attributes:
        start: does it once, from a source to a target.
        source: the elements of the input.
        target: those of the output; ``None`` of an op in place.
        expected: the output of a rank; ``None`` where it gets none.
        bus_factor: busbw / algbw of so many ranks (nccl-tests' doc/PERFORMANCE.md).
        reduces: whether there is a reduce operation.
    """

    start: Callable[[allfold.Group, Bench, Array, Array], object]
    source: Callable[[Share], int]
    target: Callable[[Share], int] | None
    expected: Callable[[Share], Array | None]
    bus_factor: Callable[[int], float]
    reduces: bool = False


def _gather(group: allfold.Group, bench: Bench, source: Array, target: Array) -> None:
    group.gather(source, 0, target if group.rank == 0 else None, **bench.options)


def _scatter(group: allfold.Group, bench: Bench, source: Array, target: Array) -> None:
    group.scatter(target, source if group.rank == 0 else None, 0, **bench.options)


def _shift(group: allfold.Group, _: Bench, source: Array, target: Array) -> None:
    """Everybody sends to the next rank."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if after == group.rank:
        np.copyto(target, source)
        return
    sending = group.send(source, after, async_op=True)
    group.recv(target, before)
    sending.wait()


KINDS: dict[str, BenchKind] = {
    "all_reduce": BenchKind(
        start=lambda group, bench, x, _: group.all_reduce(x, bench.op, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.folded(),
        bus_factor=_twice_without_own,
        reduces=True,
    ),
    "reduce": BenchKind(
        start=lambda group, bench, x, _: group.reduce(x, 0, bench.op, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.folded() if share.is_root else None,
        bus_factor=_same,
        reduces=True,
    ),
    "broadcast": BenchKind(
        start=lambda group, bench, x, _: group.broadcast(x, 0, **bench.options),
        source=_whole,
        target=None,
        expected=lambda share: share.brought_by(0, share.count),
        bus_factor=_same,
    ),
    "all_gather": BenchKind(
        start=lambda group, bench, x, y: group.all_gather(x, y, **bench.options),
        source=_block,
        target=_whole,
        expected=lambda share: share.gathered(),
        bus_factor=_without_own,
    ),
    "reduce_scatter": BenchKind(
        start=lambda group, bench, x, y: group.reduce_scatter(x, y, bench.op, **bench.options),
        source=_whole,
        target=_block,
        expected=lambda share: share.own(share.folded()),
        bus_factor=_without_own,
        reduces=True,
    ),
    "gather": BenchKind(
        start=_gather,
        source=_block,
        target=_whole,
        expected=lambda share: share.gathered() if share.is_root else None,
        bus_factor=_without_own,
    ),
    "scatter": BenchKind(
        start=_scatter,
        source=_whole,
        target=_block,
        expected=lambda share: share.own(share.brought_by(0, share.count)),
        bus_factor=_without_own,
    ),
    "all_to_all": BenchKind(
        start=lambda group, bench, x, y: group.all_to_all(x, y, **bench.options),
        source=_whole,
        target=_whole,
        expected=lambda share: share.exchanged(),
        bus_factor=_without_own,
    ),
    "send_recv": BenchKind(
        start=_shift,
        source=_whole,
        target=_whole,
        expected=lambda share: share.brought_by((share.rank - 1) % share.world, share.count),
        bus_factor=_same,
    ),
}
