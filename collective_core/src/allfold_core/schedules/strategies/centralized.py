"""Everybody sends to one hub, which folds and sends the result back: a star.

It is the tree of arity P-1, whose depth is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from allfold_core.operations import Kind
from allfold_core.schedules.closed_form import PricedOp
from allfold_core.schedules.schedule import Step
from allfold_core.schedules.strategies import tree
from allfold_core.schedules.strategy import Description, Problem, Strategy, in_tree_order


def program(problem: Problem, me: int) -> Iterator[Step]:
    """The program of position ``me``: position 0 is the hub."""
    return tree.program(problem, me, problem.nodes - 1)


def seconds(op: PricedOp) -> float:
    """The time of the star."""
    return tree.seconds(op, op.nodes - 1)


STRATEGY = Strategy(
    name="centralized",
    kinds=frozenset(Kind) - {Kind.ALL_TO_ALL},
    compile=program,
    predict=seconds,
    positions=in_tree_order,
    sparse_kinds=frozenset({Kind.REDUCE}),
    description=Description(
        summary="everybody sends to one hub, which answers",
        steps="2",
        sent="(P−1) m",
        seconds="as `tree(P−1)`",
        auto_for="short broadcasts and reduces on few nodes",
    ),
)
