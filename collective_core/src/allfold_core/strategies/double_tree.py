"""Two complementary binary trees, half of the tensor on each.

A binary tree leaves the bandwidth of its leaves unused. Two trees in which every node is inner at
most once use it: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009). The first tree numbers its nodes in order, so that all leaves have even
numbers (from 0); the second is its mirror image where the number of nodes is even, and the first
shifted by one where it is odd.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Slice, Step, balanced_slices
from allfold_core.strategies.phases import Place, copy_down, fold_up, two_waves


def first_place(nodes: int, me: int) -> Place:
    """The place of ``me`` in the first tree."""
    number = me + 1
    return Place(_parent(nodes, number) - 1, tuple(c - 1 for c in _children(nodes, number)))


def second_place(nodes: int, me: int) -> Place:
    """The place of ``me`` in the second tree."""
    if nodes % 2 == 0:
        place = first_place(nodes, nodes - 1 - me)
        parent = nodes - 1 - place.parent if place.parent >= 0 else -1
        return Place(parent, tuple(nodes - 1 - child for child in place.children))
    place = first_place(nodes, (me + 1) % nodes)
    parent = (place.parent - 1) % nodes if place.parent >= 0 else -1
    return Place(parent, tuple((child - 1) % nodes for child in place.children))


def _parent(nodes: int, number: int) -> int:
    """The parent in the in-order tree of the numbers 1..nodes; 0 for the root.

    A number whose lowest set bit is b is b's level above the leaves; its parent differs by b and
    has a higher lowest bit. In a tree that is not full, parents beyond the end are skipped.
    """
    if number == 1 << (nodes.bit_length() - 1):
        return 0
    while True:
        lowest = number & -number
        number = (number ^ lowest) | lowest << 1
        if number <= nodes:
            return number


def _children(nodes: int, number: int) -> Iterator[int]:
    """The children in the in-order tree of the numbers 1..nodes, the lower one first."""
    step = (number & -number) >> 1
    if not step:
        return
    yield number - step
    while step and number + step > nodes:
        step >>= 1
    if step:
        yield number + step


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of position ``me``.

    The waves come in one order on all nodes (up, up, down, down): where both trees use an edge,
    its two ends agree on whose turn it is, and no wave waits for a later one.
    """
    first, second = first_place(nodes, me), second_place(nodes, me)
    low, high = balanced_slices(numel, 2)
    if kind is Kind.BARRIER or not high:
        yield from two_waves(kind, first, me, Slice(0, numel))
        return
    yield from fold_up(first, me, low)
    yield from fold_up(second, me, high)
    yield from copy_down(first, low)
    yield from copy_down(second, high)
