"""Reduce-scatter and all-gather around a ring; 2(P-1)/P of the tensor leaves every node.

After Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009). With fewer elements than nodes there is not a slice for everyone: then, and for barriers,
a binary tree takes its place; where a node's block is empty, the mesh does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Fold, Receive, Send, Slice, Step, balanced_slices
from allfold_core.schedules.strategies import direct, tree
from allfold_core.schedules.strategy import Description, Problem, Strategy


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of node ``me``, which folds slice ``me`` last and so owns it."""
    if problem.blocks:
        return _half(problem.kind, problem.blocks, me)
    if problem.kind is Kind.BARRIER or problem.numel < problem.nodes:
        return tree.program(problem, me, 2)
    return _all_reduce(balanced_slices(problem.numel, problem.nodes), me)


def _all_reduce(slices: Sequence[Slice], me: int) -> Iterator[Step]:
    yield from _reduce_scatter(slices, me)
    yield from _all_gather(slices, me)


def _half(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """One half of the ring, over given blocks."""
    if not all(blocks):
        return direct.block_program(kind, blocks, me)
    return _reduce_scatter(blocks, me) if kind is Kind.REDUCE_SCATTER else _all_gather(blocks, me)


def _reduce_scatter(slices: Sequence[Slice], me: int) -> Iterator[Step]:
    nodes = len(slices)
    before, after = (me - 1) % nodes, (me + 1) % nodes
    for step in range(nodes - 1):
        yield Send(slices[(me - 1 - step) % nodes], after)
        yield Fold(slices[(me - 2 - step) % nodes], (before, me))


def _all_gather(slices: Sequence[Slice], me: int) -> Iterator[Step]:
    nodes = len(slices)
    before, after = (me - 1) % nodes, (me + 1) % nodes
    for step in range(nodes - 1):
        yield Send(slices[(me - step) % nodes], after)
        yield Receive(slices[(me - 1 - step) % nodes], before)


def seconds(op: PricedOp) -> float:
    """The time of the ring.

    Sending goes on while the first chunk of the next step is under way, so a latency shorter than
    a step's transfer costs nothing.
    """
    if op.kind.has_blocks:
        return (op.nodes - 1) * op.alpha + op.all_other_blocks()
    if op.kind is Kind.BARRIER or op.nbytes < op.nodes:
        return tree.seconds(op, 2)
    size = op.nbytes / op.nodes
    chunk = size / op.pieces(size)
    scatter = max(size * max(op.beta, op.gamma), op.alpha + chunk * (op.beta + op.gamma))
    gather = max(size * op.beta, op.alpha + chunk * op.beta)
    return (op.nodes - 1) * scatter + (op.nodes - 2) * gather + op.alpha + size * op.beta


STRATEGY = Strategy(
    name="ring",
    kinds=frozenset({Kind.ALL_REDUCE, Kind.BARRIER, Kind.ALL_GATHER, Kind.REDUCE_SCATTER}),
    compile=program,
    predict=seconds,
    description=Description(
        summary="slices go round the ring as partial sums, and once more when complete",
        steps="2(P−1)",
        sent="2(P−1)/P m",
        seconds="2(P−1)α + (P−1)/P · m(2β + γ)",
        auto_for="long tensors",
    ),
)
