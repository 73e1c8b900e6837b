"""Fold along a line of nodes and copy back along it: the "linear pipeline".

Its bandwidth is that of the double tree, its latency grows with the number of nodes, so it is for
few nodes and long tensors. A barrier moves no data and takes the binary tree instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Step
from allfold_core.strategies import tree


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of position ``me``: position 0 is the end where the result is made."""
    yield from tree.program(kind, nodes, numel, me, arity=2 if kind is Kind.BARRIER else 1)
