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
from allfold_core.schedules.closed_form import PricedOp, halvings
from allfold_core.schedules.schedule import Fold, Receive, Send, Slice, Step, balanced_slices
from allfold_core.schedules.strategies import direct, tree
from allfold_core.schedules.strategy import Description, Problem, Strategy

# The slices that the nodes [first, stop) keep when the tensor is split among them.
Share = Callable[[int, int], list[Slice]]


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of node ``me``: nodes from the greatest power of two on are the extra ones."""
    if problem.kind is Kind.BARRIER:
        return tree.program(problem, me, 2)
    if problem.blocks:
        return _one_half(problem.kind, problem.blocks, me)
    return _all_reduce(problem.nodes, problem.whole, me)


def _all_reduce(nodes: int, whole: Slice, me: int) -> Iterator[Step]:
    core = 1 << halvings(nodes)
    slices = balanced_slices(len(whole), core)

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


def _one_half(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """One half of the algorithm, over given blocks; a node stands for its extra one too."""
    if not all(blocks):
        yield from direct.block_program(kind, blocks, me)
        return
    core = 1 << halvings(len(blocks))

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
    """Return the slices that the ``distance`` nodes around ``node`` keep after the exchange."""
    first = node - node % distance
    return share(first, first + distance)


def _joined(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices with adjacent ones merged and empty ones dropped."""
    joined: list[Slice] = []
    for part in filter(None, slices):
        if joined and joined[-1].stop == part.start:
            part = Slice(joined.pop().start, part.stop)
        joined.append(part)
    return joined


def _without(slices: Sequence[Slice], hole: Slice) -> list[Slice]:
    """Return slices without the elements of ``hole``, which lies in one of them."""
    parts: list[Slice] = []
    for part in slices:
        if part.start <= hole.start and hole.stop <= part.stop:
            parts += [Slice(part.start, hole.start), Slice(hole.stop, part.stop)]
        else:
            parts.append(part)
    return [part for part in parts if part]


# What a node may send early to its next partner competes with what it still owes to the present
# one. The next message is half as long, so chunks cost half as much again.
_SHARED_PORT = 1.5


def seconds(op: PricedOp) -> float:
    """The time of halving and doubling; of blocks, of one of them."""
    if op.kind is Kind.BARRIER:
        return tree.seconds(op, 2)
    steps = halvings(op.nodes)
    core = 1 << steps
    if op.kind.has_blocks:
        extra = 2 * op.alpha + op.nbytes * op.block_bytes() if op.nodes > core else 0.0
        return steps * op.alpha + op.all_other_blocks() + extra
    chunks = op.pieces(op.nbytes / 2)
    per_byte = op.folding(chunks) + op.beta
    if chunks > 1:
        per_byte *= _SHARED_PORT
    extra = 2 * op.alpha + op.nbytes * per_byte if op.nodes > core else 0.0
    return 2 * steps * op.alpha + (core - 1) / core * op.nbytes * per_byte + extra


def senders(kind: Kind, nodes: int) -> int:
    """Return the number of sends that overlap: for kinds with blocks, one per partner."""
    return halvings(nodes) if kind.has_blocks else 0


STRATEGY = Strategy(
    name="halving_doubling",
    kinds=frozenset({Kind.ALL_REDUCE, Kind.BARRIER, Kind.ALL_GATHER, Kind.REDUCE_SCATTER}),
    compile=program,
    predict=seconds,
    joins_slices=True,
    senders=senders,
    description=Description(
        summary="pairs exchange halves, quarters ..., and then the way back (Rabenseifner)",
        steps="2 log₂P",
        sent="2(P−1)/P m, for P a power of two",
        seconds="2 log₂P · α + (P−1)/P · m(2β + γ); beyond a power of two 2(α + mβ) + mγ more",
        auto_for="medium tensors on many nodes",
    ),
)
