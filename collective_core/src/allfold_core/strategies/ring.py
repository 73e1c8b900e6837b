"""Reduce-scatter and all-gather around a ring; 2(P-1)/P of the tensor leaves every node.

After Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009). With fewer elements than nodes there is not a slice for everyone: then, and for barriers,
a binary tree takes its place; where a node's block is empty, the mesh does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allfold_core.operations import Kind
from allfold_core.schedule import Fold, Receive, Send, Slice, Step, balanced_slices
from allfold_core.strategies import direct, tree


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``, which folds slice ``me`` last and so owns it."""
    if kind is Kind.BARRIER or numel < nodes:
        yield from tree.program(kind, nodes, numel, me, arity=2)
        return
    slices = balanced_slices(numel, nodes)
    yield from _reduce_scatter(slices, me)
    yield from _all_gather(slices, me)


def block_program(kind: Kind, blocks: Sequence[Slice], me: int) -> Iterator[Step]:
    """One half of the ring, over given blocks."""
    if not all(blocks):
        yield from direct.block_program(kind, blocks, me)
    elif kind is Kind.REDUCE_SCATTER:
        yield from _reduce_scatter(blocks, me)
    else:
        yield from _all_gather(blocks, me)


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
