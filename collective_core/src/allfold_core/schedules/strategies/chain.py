"""Fold along a line of nodes and copy back along it: the "linear pipeline".

It is the tree of arity 1. Its bandwidth is that of the double tree, its latency grows with the
number of nodes, so it is for few nodes and long tensors. A barrier moves no data and takes the
binary tree instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Step
from allfold_core.schedules.strategies import tree
from allfold_core.schedules.strategy import Description, Problem, Strategy, in_tree_order


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of position ``me``: position 0 is the end where the result is made."""
    return tree.program(problem, me, _arity(problem.kind))


def seconds(op: PricedOp) -> float:
    """The time of the line."""
    return tree.seconds(op, _arity(op.kind))


def _arity(kind: Kind) -> int:
    return 2 if kind is Kind.BARRIER else 1


STRATEGY = Strategy(
    name="chain",
    kinds=frozenset(
        {
            Kind.ALL_REDUCE,
            Kind.REDUCE,
            Kind.BROADCAST,
            Kind.BARRIER,
            Kind.GATHER,
            Kind.SCATTER,
        }
    ),
    compile=program,
    predict=seconds,
    positions=in_tree_order,
    description=Description(
        summary="along a line of nodes, and back",
        steps="2(P−1)",
        sent="2 m",
        seconds="as `tree(1)`",
        auto_for="long broadcasts and reduces",
    ),
)
