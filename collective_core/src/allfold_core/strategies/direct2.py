"""Flat reduce-scatter and all-gather: the bytes of the ring with two latencies.

Node i owns slice i: it gets that slice from everybody, folds it in node order in one step (one
rounding for half types), and sends it to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedule import Fold, Receive, Send, Step, balanced_slices
from allfold_core.strategies.direct import barrier, others_after, others_before


def program(kind: Kind, nodes: int, numel: int, me: int) -> Iterator[Step]:
    """The program of node ``me``, the owner of slice ``me``."""
    if kind is Kind.BARRIER:
        yield from barrier(nodes, me)
        return
    slices = balanced_slices(numel, nodes)
    yield from (Send(slices[other], other) for other in others_after(nodes, me) if slices[other])
    if slices[me]:
        yield Fold(slices[me], tuple(range(nodes)))
        yield from (Send(slices[me], other) for other in others_after(nodes, me))
    yield from (
        Receive(slices[other], other) for other in others_before(nodes, me) if slices[other]
    )
