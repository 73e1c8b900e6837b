"""Reduce-scatter and all-gather around a ring; 2(P-1)/P of the tensor leaves every node.

After Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009). With fewer elements than nodes there is not a slice for everyone: then, and for barriers,
a binary tree takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Fold, Receive, Send, Step, balanced_slices
from allfold_core.strategies import tree


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``, which folds slice ``me`` last and so owns it."""
    if kind is Kind.BARRIER or numel < nodes:
        yield from tree.program(kind, nodes, numel, me, arity=2)
        return
    slices = balanced_slices(numel, nodes)
    before, after = (me - 1) % nodes, (me + 1) % nodes
    for step in range(nodes - 1):
        yield Send(slices[(me - 1 - step) % nodes], after)
        yield Fold(slices[(me - 2 - step) % nodes], (before, me))
    for step in range(nodes - 1):
        yield Send(slices[(me - step) % nodes], after)
        yield Receive(slices[(me - 1 - step) % nodes], before)
