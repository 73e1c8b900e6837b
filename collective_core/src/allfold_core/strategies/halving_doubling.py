"""Recursive halving, then recursive doubling: the bytes of the ring in 2 log2 P steps.

Rabenseifner's all-reduce, as in Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH" (2005); its halves are the reduce-scatter and the all-gather.
Only a power of two of nodes can take part; the nodes beyond it hand their contribution to a
partner before and get the result from it afterwards. Barriers take the binary tree, and where a
node's block is empty, the mesh takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedule import Fold, Receive, Send, Slice, Step, balanced_slices
from allfold_core.strategies import direct, tree

# The slices that the nodes [first, stop) keep when the tensor is split among them.
Share = Callable[[int, int], list[Slice]]


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``: nodes from the greatest power of two on are the extra ones."""
    if kind is Kind.BARRIER:
        yield from tree.program(kind, nodes, numel, me, arity=2)
        return
    core = 1 << (nodes.bit_length() - 1)
    whole = Slice(0, numel)
    slices = balanced_slices(numel, core)

    def share(first: int, stop: int) -> list[Slice]:
        return _joined(slices[first:stop])

    if me >= core:
        yield Send(whole, me - core)
        yield Receive(whole, me - core)
        return
    has_extra = me + core < nodes
    if has_extra:
        yield Fold(whole, (me, me + core))
    yield from _halve(core, share, me)
    yield from _double(core, share, me)
    if has_extra:
        yield Send(whole, me + core)


def block_program(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """One half of the algorithm, over given blocks; a node stands for its extra one too."""
    if not all(blocks):
        yield from direct.block_program(kind, blocks, me)
        return
    nodes = len(blocks)
    core = 1 << (nodes.bit_length() - 1)

    def share(first: int, stop: int) -> list[Slice]:
        return _joined([*blocks[first:stop], *blocks[core + first : core + stop]])

    everything = share(0, core)
    if kind is Kind.REDUCE_SCATTER:
        yield from _reduce_scatter(blocks, me, core, everything, share)
    else:
        yield from _all_gather(blocks, me, core, everything, share)


def _reduce_scatter(
    blocks: Sequence[Slice], me: int, core: int, everything: list[Slice], share: Share
) -> Iterator[Step]:
    if me >= core:
        yield from (Send(part, me - core) for part in everything)
        yield Receive(blocks[me], me - core)
        return
    extra = me + core
    if extra < len(blocks):
        yield from (Fold(part, (me, extra)) for part in everything)
    yield from _halve(core, share, me)
    if extra < len(blocks):
        yield Send(blocks[extra], extra)


def _all_gather(
    blocks: Sequence[Slice], me: int, core: int, everything: list[Slice], share: Share
) -> Iterator[Step]:
    if me >= core:
        yield Send(blocks[me], me - core)
        yield from (Receive(part, me - core) for part in _without(everything, blocks[me]))
        return
    extra = me + core
    if extra < len(blocks):
        yield Receive(blocks[extra], extra)
    yield from _double(core, share, me)
    if extra < len(blocks):
        yield from (Send(part, extra) for part in _without(everything, blocks[extra]))


def _halve(core: int, share: Share, me: int) -> Iterator[Step]:
    """Reduce-scatter among the nodes 0..core-1, a power of two."""
    distance = core // 2
    while distance:
        partner = me ^ distance
        yield from (Send(part, partner) for part in _half(share, partner, distance))
        order = (min(me, partner), max(me, partner))
        yield from (Fold(part, order) for part in _half(share, me, distance))
        distance //= 2


def _double(core: int, share: Share, me: int) -> Iterator[Step]:
    """All-gather among the nodes 0..core-1, a power of two."""
    distance = 1
    while distance < core:
        partner = me ^ distance
        yield from (Send(part, partner) for part in _half(share, me, distance))
        yield from (Receive(part, partner) for part in _half(share, partner, distance))
        distance *= 2


def _half(share: Share, node: int, distance: int) -> list[Slice]:
    """What the ``distance`` nodes around ``node`` keep when the others go their own way."""
    first = node - node % distance
    return share(first, first + distance)


def _joined(slices: Sequence[Slice]) -> list[Slice]:
    """The same elements in as few slices as possible, without empty ones."""
    joined: list[Slice] = []
    for part in filter(None, slices):
        if joined and joined[-1].stop == part.start:
            part = Slice(joined.pop().start, part.stop)
        joined.append(part)
    return joined


def _without(slices: Sequence[Slice], hole: Slice) -> list[Slice]:
    """The same elements but those of ``hole``, which lies in one of the slices."""
    parts: list[Slice] = []
    for part in slices:
        if part.start <= hole.start and hole.stop <= part.stop:
            parts += [Slice(part.start, hole.start), Slice(hole.stop, part.stop)]
        else:
            parts.append(part)
    return [part for part in parts if part]
