"""Flat reduce-scatter and all-gather: the bytes of the ring with two latencies.

Node i owns slice i: it gets that slice from everybody, folds it in node order in one step (one
rounding for half types), and sends it to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Fold, Receive, Send, Step, balanced_slices
from allfold_core.schedules.strategies.direct import (
    barrier,
    others_after,
    others_before,
    senders,
)
from allfold_core.schedules.strategy import Description, Problem, Strategy


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of node ``me``, the owner of slice ``me``."""
    nodes = problem.nodes
    if problem.kind is Kind.BARRIER:
        yield from barrier(nodes, me)
        return
    slices = balanced_slices(problem.numel, nodes)
    yield from (Send(slices[other], other) for other in others_after(nodes, me) if slices[other])
    if slices[me]:
        yield Fold(slices[me], tuple(range(nodes)))
        yield from (Send(slices[me], other) for other in others_after(nodes, me))
    yield from (
        Receive(slices[other], other) for other in others_before(nodes, me) if slices[other]
    )


def seconds(op: PricedOp) -> float:
    """The time of two meshes; the second begins while the first still folds."""
    if op.kind is Kind.BARRIER:
        return op.to_all_others()
    size = op.nbytes / op.nodes
    burst, passed = op.to_all_others(), (op.nodes - 1) * size
    first = burst + passed / op.pieces(size) * (op.beta + op.gamma)
    return max(passed * max(op.beta, op.gamma), first) + burst + passed * op.beta


STRATEGY = Strategy(
    name="direct2",
    kinds=frozenset({Kind.ALL_REDUCE, Kind.BARRIER}),
    compile=program,
    predict=seconds,
    senders=senders,
    parallel_kinds=frozenset({Kind.ALL_REDUCE}),
    sparse_kinds=frozenset({Kind.ALL_REDUCE}),
    description=Description(
        summary="node i folds slice i of everybody, and sends it to everybody",
        steps="2",
        sent="2(P−1)/P m",
        seconds="2(α + (P−2)o) + (P−1)/P · m(2β + γ)",
        auto_for="medium tensors, and all longer ones on 2 nodes",
    ),
)
