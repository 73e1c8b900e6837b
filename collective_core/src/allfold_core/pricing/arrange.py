"""The order of the nodes in rings and trees that avoids slow links. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from allfold_core.operations import AUTO, Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.per_link import (
    Delay,
    bandwidth_seconds,
    delay,
    seconds_over_links,
    shares_of,
)
from allfold_core.pricing.predict import predict
from allfold_core.schedules.registry import candidates
from allfold_core.topology import Layout, SlowLink

REFERENCE_BYTES = 16 << 20
"""Layouts are compared by an all-reduce of so many bytes: small ops do not feel a slow link."""

_Score = Callable[[Sequence[str]], tuple[float, ...]]


def arrange(plan: Plan, usual: float, slow: tuple[SlowLink, ...]) -> Plan:
    """Return a plan with its nodes in the best order that is known for these links.

    Few nodes change their places: the order is improved by swapping two at a time.

    Args:
        plan: in the order in which the group was opened.
        usual: seconds per byte of the links that are not slow.
        slow: the others.
    """
    figures = Layout(usual=usual, slow=slow)
    ring = _improved([member.node for member in plan.members], _score(plan, figures, in_tree=False))
    names = [member.node for member in plan.members]
    tree = _improved(
        [names[index] for index in plan.tree_order], _score(plan, figures, in_tree=True)
    )
    return replace(
        plan,
        members=tuple(plan.members[plan.index_of_node(node)] for node in ring),
        tree_order=tuple(map(ring.index, tree)),
        layout=replace(figures, ring=tuple(ring), tree=tuple(tree)),
    )


def _names(plan: Plan) -> tuple[str, ...]:
    """The strategies by which an all-reduce may run."""
    own = plan.options.strategies.get(Kind.ALL_REDUCE.label, AUTO)
    return candidates(Kind.ALL_REDUCE) if own == AUTO else (own,)


def _score(plan: Plan, figures: Layout, *, in_tree: bool) -> _Score:
    """Return a function that maps an order of the nodes to the time of the best strategy."""
    beta, nodes = plan.links.seconds_per_byte, len(plan.members)
    rated = []
    for name in _names(plan):
        shares = shares_of(Kind.ALL_REDUCE, name, nodes)
        if shares.in_tree == in_tree:
            alike = predict(Kind.ALL_REDUCE, name, nodes, REFERENCE_BYTES, plan.links)
            rated.append((shares, alike - REFERENCE_BYTES * shares.port * beta))

    def score(order: Sequence[str]) -> tuple[float, ...]:
        def seconds(each: int) -> tuple[float, float]:
            shares, rest = rated[each]
            found: Delay = delay(shares, order, REFERENCE_BYTES, beta, figures)
            return rest + found.busiest, found.over_slow

        return min(map(seconds, range(len(rated))), default=(0.0, 0.0))

    return score


def _improved(order: list[str], score: _Score) -> list[str]:
    best = score(order)
    while True:
        swapped = [_swap(order, *pair) for pair in combinations(range(len(order)), 2)]
        found = min(swapped, key=score, default=order)
        if score(found) >= best:
            return order
        order, best = found, score(found)


def _swap(order: Sequence[str], one: int, other: int) -> list[str]:
    swapped = list(order)
    swapped[one], swapped[other] = order[other], order[one]
    return swapped


def reference_seconds(plan: Plan, figures: Layout) -> float:
    """The seconds of the reference op as a plan runs it, where links cost what figures say."""
    name = choose(Kind.ALL_REDUCE, plan, REFERENCE_BYTES)
    return seconds_over_links(Kind.ALL_REDUCE, name, plan, REFERENCE_BYTES, figures)


def bandwidth_bound(plan: Plan, usual: float, slow: tuple[SlowLink, ...], nbytes: int) -> float:
    """The least seconds for which the busiest link sends in an all-reduce.

    Of all strategies, each with its nodes in the best order that is known for these links.

    Args:
        plan: in the order in which the group was opened.
    """
    asked = {
        name: replace(plan.options, strategies={Kind.ALL_REDUCE.label: name})
        for name in candidates(Kind.ALL_REDUCE)
    }
    arranged = (
        (name, arrange(replace(plan, options=options), usual, slow))
        for name, options in asked.items()
    )
    return min(bandwidth_seconds(Kind.ALL_REDUCE, name, each, nbytes) for name, each in arranged)
