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
from allfold_core.schedules.closed_form import PricedOp, halvings
from allfold_core.schedules.schedule import Step, balanced_slices
from allfold_core.schedules.strategies.phases import TreePlace, copy_down, fold_up, two_waves
from allfold_core.schedules.strategy import Description, Problem, Strategy, in_tree_order


def first_place(nodes: int, me: int) -> TreePlace:
    """The place of ``me`` in the first tree."""
    number = me + 1
    return TreePlace(_parent(nodes, number) - 1, tuple(c - 1 for c in _children(nodes, number)))


def second_place(nodes: int, me: int) -> TreePlace:
    """The place of ``me`` in the second tree."""
    if nodes % 2 == 0:
        place = first_place(nodes, nodes - 1 - me)
        parent = nodes - 1 - place.parent if place.parent >= 0 else -1
        return TreePlace(parent, tuple(nodes - 1 - child for child in place.children))
    place = first_place(nodes, (me + 1) % nodes)
    parent = (place.parent - 1) % nodes if place.parent >= 0 else -1
    return TreePlace(parent, tuple((child - 1) % nodes for child in place.children))


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


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of position ``me``.

    The waves come in one order on all nodes (up, up, down, down): where both trees use an edge,
    its two ends agree on whose turn it is, and no wave waits for a later one.
    """
    first, second = first_place(problem.nodes, me), second_place(problem.nodes, me)
    low, high = balanced_slices(problem.numel, 2)
    if not high:
        yield from two_waves(problem.kind, first, me, problem.whole)
        return
    yield from fold_up(first, me, low)
    yield from fold_up(second, me, high)
    yield from copy_down(first, low)
    yield from copy_down(second, high)


def seconds(op: PricedOp) -> float:
    """The time of two binary trees, half of the tensor each; the way up and down overlap."""
    depth, children = halvings(op.nodes), min(2, op.nodes - 1)
    latencies = 2 * depth * op.burst(children)
    chunks = op.pieces(op.nbytes / 2)
    chunk = op.nbytes / 2 / chunks
    beta, gamma = op.beta * chunk, op.gamma * chunk
    first = latencies + depth * children * (2 * beta + gamma)
    # Per chunk of both trees: an inner node passes 3 (the root of few nodes fewer), a leaf 1.
    return first + (chunks - 1) * max(min(op.nodes, 4) * beta, children * gamma)


STRATEGY = Strategy(
    name="double_tree",
    kinds=frozenset({Kind.ALL_REDUCE, Kind.BARRIER}),
    compile=program,
    predict=seconds,
    positions=in_tree_order,
    description=Description(
        summary="two binary trees with half of the tensor each; an inner node of one is a leaf of "
        "the other",
        steps="2 log₂P",
        sent="2 m",
        seconds="as `tree(2)` with m/2",
        auto_for="long tensors on very many nodes",
    ),
)
