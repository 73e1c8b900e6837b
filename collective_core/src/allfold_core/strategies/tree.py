"""Reduce up a k-ary tree, copy down the same tree.

The tree is a heap: the children of position i are i*k+1 .. i*k+k. An arity of 1 is a chain, one of
nodes - 1 or more is a star.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Slice, Step
from allfold_core.strategies.phases import Place, two_waves


def place_in_heap(nodes: int, arity: int, me: int) -> Place:
    """The place of position ``me`` in a heap of ``nodes`` positions."""
    first = me * arity + 1
    children = tuple(range(min(first, nodes), min(first + arity, nodes)))
    return Place((me - 1) // arity if me else -1, children)


def preorder_ranks(nodes: int, arity: int) -> tuple[int, ...]:
    """For each position of a heap, when a depth-first walk from the root comes by.

    Subtrees are contiguous in this numbering (in the heap's own they are not), so nodes that are
    neighbours in an order given by ranks share parents wherever the tree allows it.
    """
    ranks = [0] * nodes
    stack = [0]
    for rank in range(nodes):
        position = stack.pop()
        ranks[position] = rank
        stack.extend(reversed(place_in_heap(nodes, arity, position).children))
    return tuple(ranks)


def program(kind: Kind, nodes: int, numel: int, me: int, arity: int) -> Iterator[Step]:
    """The program of position ``me``: position 0 is the root."""
    yield from two_waves(kind, place_in_heap(nodes, arity, me), me, Slice(0, numel))
