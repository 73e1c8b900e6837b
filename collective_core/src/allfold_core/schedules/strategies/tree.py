"""Reduce up a k-ary tree, copy down the same tree.

The tree is a heap: the children of position i are i*k+1 .. i*k+k. An arity of 1 is a chain, one of
nodes - 1 or more is a star.

Beyond a long tensor's first chunk, the way up and the way down overlap, and each chunk costs what
the busiest port passes: k+1 chunks. That is less than the usual (2d+c-1)(α + ...), in which every
chunk waits for a latency of its own. In trees that are not full the closed form is an upper bound.

A broadcast or reduce has one wave with data and one with signals (no node may finish before it has
heard from all), so it pays the latencies twice and the bytes once; a barrier has only signals.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp, heap_depth
from allfold_core.schedules.schedule import Step
from allfold_core.schedules.strategies import tree_blocks
from allfold_core.schedules.strategies.phases import place_in_heap, two_waves
from allfold_core.schedules.strategy import Description, Parameter, Problem, Strategy


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


def program(problem: Problem, me: int, arity: int) -> Iterator[Step]:
    """The program of position ``me`` in a tree of an arity; position 0 is the root."""
    if problem.blocks:
        return tree_blocks.program(problem.kind, problem.blocks, me, arity)
    place = place_in_heap(problem.nodes, arity, me)
    return two_waves(problem.kind, place, me, problem.whole)


def seconds(op: PricedOp, arity: int) -> float:
    """The time of a tree of an arity."""
    arity = min(arity, op.nodes - 1)
    if op.kind.has_blocks:
        return tree_blocks.seconds(op, arity)
    depth, chunks = heap_depth(op.nodes, arity), op.pieces(op.nbytes)
    chunk = op.nbytes / chunks
    beta, gamma = op.beta * chunk, op.gamma * chunk
    time = 2 * depth * op.burst(arity)
    if op.kind is Kind.ALL_REDUCE:
        # A port of an inner node passes k children's chunks one way and one of the parent.
        passed = arity + 1 if depth > 1 else arity
        time += depth * arity * (2 * beta + gamma)
        return time + (chunks - 1) * max(passed * beta, arity * gamma)
    if op.kind is Kind.REDUCE:
        return time + arity * (depth * (beta + gamma) + (chunks - 1) * max(beta, gamma))
    return time + arity * (depth + chunks - 1) * beta


def _program(problem: Problem, me: int) -> Iterator[Step]:
    return program(problem, me, problem.parameter)


def _seconds(op: PricedOp) -> float:
    return seconds(op, op.parameter)


STRATEGY = Strategy(
    name="tree",
    kinds=frozenset(Kind) - {Kind.ALL_TO_ALL},
    compile=_program,
    predict=_seconds,
    parameter=Parameter("arity", "k", default=2, alternatives=(4, 8)),
    positions=preorder_ranks,
    description=Description(
        summary="up a tree with k children per node, and down again; `tree` is `tree(2)`",
        steps="2 logₖP",
        sent="(k+1) m",
        seconds="2d(α + (k−1)o + kmβ) + dkmγ, where d is the depth of the tree",
        auto_for="tiny tensors on very many nodes; broadcast and reduce",
    ),
)
