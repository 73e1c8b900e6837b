"""Blocks up and down a k-ary tree: gather, scatter, all-gather and reduce-scatter.

A node stands for its whole subtree: what goes up to its parent are the subtree's blocks, and so is
what comes down to be scattered. An empty block has no message; where one is among the blocks that
an edge passes, a signal vouches for its node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp, heap_depth
from allfold_core.schedules.schedule import Await, Receive, Send, Signal, Slice, Step
from allfold_core.schedules.strategies.phases import (
    TreePlace,
    fold_up,
    place_in_heap,
    signal_down,
    signal_up,
)


def program(kind: Kind, blocks: Sequence[Slice], me: int, arity: int) -> Iterator[Step]:
    """The program of position ``me`` of a heap; position 0 is the root, if the kind has one."""
    nodes = len(blocks)
    place = place_in_heap(nodes, arity, me)
    if kind is Kind.REDUCE_SCATTER:
        yield from fold_up(place, me, _whole(blocks))
    elif kind is Kind.SCATTER:
        yield from signal_up(place)
    else:
        yield from _gather_up(place, blocks, me, arity)
    if kind is Kind.GATHER:
        yield from signal_down(place)
    elif kind is Kind.ALL_GATHER:
        yield from _spread_down(place, blocks, me, arity)
    else:
        yield from _scatter_down(place, blocks, me, arity)


def seconds(op: PricedOp, arity: int) -> float:
    """The time of the blocks in a tree of an arity, which is below the number of nodes.

    In a scatter the root sends block by block, and the last one goes all the way down. An
    all-gather or reduce-scatter is a gather or scatter one way and a broadcast or reduce the other.
    """
    depth, per_byte = heap_depth(op.nodes, arity), op.block_bytes()
    block = op.nbytes / op.nodes
    # One way for signals, or for what is folded; the root's port for the other blocks.
    way, passed = depth * op.burst(arity), op.to_all_others()
    moved = (op.nodes - 1) * block * per_byte
    if op.kind is Kind.SCATTER:
        return way + passed + moved + (depth - 1) * (op.alpha + block * per_byte)
    time = way + max(way, passed) + moved
    if op.kind is Kind.GATHER:
        return time
    # What comes back is the whole tensor to each of k children, on every level.
    return time + depth * arity * op.nbytes * per_byte


def subtree(nodes: int, arity: int, position: int) -> list[int]:
    """The positions at and below one, in order."""
    level = range(position, position + 1)
    found: list[int] = []
    while level:
        found.extend(level)
        first = level.start * arity + 1
        level = range(min(first, nodes), min(first + arity * len(level), nodes))
    return found


def _whole(blocks: Sequence[Slice]) -> Slice:
    return Slice(min(block.start for block in blocks), max(block.stop for block in blocks))


def _gather_up(place: TreePlace, blocks: Sequence[Slice], me: int, arity: int) -> Iterator[Step]:
    for child in place.children:
        yield from take(blocks, subtree(len(blocks), arity, child), child)
    if place.parent >= 0:
        yield from give(blocks, subtree(len(blocks), arity, me), place.parent)


def _scatter_down(place: TreePlace, blocks: Sequence[Slice], me: int, arity: int) -> Iterator[Step]:
    if place.parent >= 0:
        yield from take(blocks, subtree(len(blocks), arity, me), place.parent)
    for child in place.children:
        yield from give(blocks, subtree(len(blocks), arity, child), child)


def _spread_down(place: TreePlace, blocks: Sequence[Slice], me: int, arity: int) -> Iterator[Step]:
    if place.parent >= 0:
        yield from take(blocks, _others(blocks, arity, me), place.parent)
    for child in place.children:
        yield from give(blocks, _others(blocks, arity, child), child)


def _others(blocks: Sequence[Slice], arity: int, position: int) -> list[int]:
    own = set(subtree(len(blocks), arity, position))
    return [other for other in range(len(blocks)) if other not in own]


def give(blocks: Sequence[Slice], members: Sequence[int], to: int) -> Iterator[Step]:
    """Send the members' blocks, and a signal for those that are empty."""
    yield from (Send(blocks[member], to) for member in members if blocks[member])
    if not all(blocks[member] for member in members):
        yield Signal(to)


def take(blocks: Sequence[Slice], members: Sequence[int], source: int) -> Iterator[Step]:
    """The other end of :func:`give`."""
    yield from (Receive(blocks[member], source) for member in members if blocks[member])
    if not all(blocks[member] for member in members):
        yield Await(source)
