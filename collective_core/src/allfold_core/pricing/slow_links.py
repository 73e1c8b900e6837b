"""The decision to plan around a slow link, and the order of nodes that avoids it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf
from typing import NamedTuple

from allfold_core.operations import AUTO, Kind
from allfold_core.plan import Plan
from allfold_core.pricing.choose import choose
from allfold_core.pricing.per_link import (
    MOST_NODES,
    Delay,
    bandwidth_seconds,
    delay,
    seconds_over_links,
    shares_of,
)
from allfold_core.pricing.predict import predict
from allfold_core.schedules.registry import candidates
from allfold_core.topology import AS_OPENED, Layout, SlowLink

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


SLOWER = 4.0
"""A link is slow that takes more than so many times as long as the others. Less may be noise: where
a receiver is late, its links seem to be faster than they are."""

WORTH = 0.8
"""Another order is taken if an op takes at most this share of the time in it."""

BELIEVED_SECONDS = 600.0
"""A link that nothing comes over is taken for slow for so long. Then it is tried again, by ops in
the order of before. If it is slow still, it is believed to be for twice as long."""

MOST_BELIEVED_SECONDS = 6 * 3600.0

GAP_SECONDS = 10.0
"""Between two changes of the order; twice as long after each, so that figures which are but noise
do no harm. After a long time without a change it is as short as at first."""

MOST_GAP_SECONDS = 3600.0


class _Measured(NamedTuple):
    """The cost of one direction between two nodes, and how long that counts."""

    seconds_per_byte: float
    until: float


class LinkTable:
    """The measured rates of the links between the nodes of a group, on its leader."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], _Measured] = {}
        self._patience: dict[tuple[str, str], float] = {}
        self._adopted = AS_OPENED

    def record(self, destination: str, rates: Mapping[str, float], now: float) -> None:
        """A node has measured how fast others send to it, in bytes per second."""
        for source, rate in rates.items():
            pair = source, destination
            patience = self._patience.get(pair, BELIEVED_SECONDS)
            self._measured[pair] = _Measured(1 / rate, now + patience)

    def adopt(self, layout: Layout, now: float) -> None:
        """Take over the slow links that another leader has planned around."""
        if layout == self._adopted:
            return
        self._adopted = layout
        for source, destination, cost in layout.slow:
            believed = _Measured(cost, now + BELIEVED_SECONDS)
            self._measured.setdefault((source, destination), believed)

    def figures(self, natural: Plan, now: float) -> Layout:
        """Return what links cost; the order of nodes is not in it.

        A slow link is forgotten if no new measurement of it has come for a long time.

        Args:
            natural: the plan in the order of the group's opening.
        """
        slow = _pairs(self._figures(natural))
        for pair in self._patience.keys() & self._measured.keys() - slow:
            del self._patience[pair]  # it has healed
        for pair in slow:
            if now > self._measured[pair].until:
                del self._measured[pair]
                patience = 2 * self._patience.get(pair, BELIEVED_SECONDS)
                self._patience[pair] = min(patience, MOST_BELIEVED_SECONDS)
        return self._figures(natural)

    def _figures(self, natural: Plan) -> Layout:
        planned, nodes = natural.links.seconds_per_byte, {each.node for each in natural.members}
        # A link that is faster than the plan's counts as the plan's: by that ops are priced.
        costs = {
            pair: max(planned, each.seconds_per_byte)
            for pair, each in self._measured.items()
            if nodes.issuperset(pair)
        }
        if not costs:
            return AS_OPENED
        # Of a leader that is new the adopted ones may be most that it knows.
        known = _pairs(self._adopted)
        others = sorted(cost for pair, cost in costs.items() if pair not in known)
        usual = others[(len(others) - 1) // 2] if others else self._adopted.usual
        slow = (SlowLink(*pair, cost) for pair, cost in costs.items() if cost > SLOWER * usual)
        return Layout(usual=usual, slow=tuple(sorted(slow)))


class ChangeLimit:
    """Bounds how often the order of nodes may change."""

    def __init__(self) -> None:
        self._gap = GAP_SECONDS
        self._not_before = -inf

    def allows(self, now: float) -> bool:
        """Return True if the last change was long enough ago."""
        return now >= self._not_before

    def count_change(self, now: float) -> None:
        """Note a change."""
        if now > self._not_before + MOST_GAP_SECONDS:
            self._gap = GAP_SECONDS
        self._not_before = now + self._gap
        self._gap = min(2 * self._gap, MOST_GAP_SECONDS)


def better_layout(present: Plan, natural: Plan, figures: Layout) -> Layout | None:
    """Return the layout that the nodes should have; ``None`` to leave it as it is.

    Args:
        present: the plan as it is.
        natural: the same in the order of the group's opening.
        figures: what links cost.
    """
    if not 2 < len(natural.members) <= MOST_NODES:
        return None
    if not figures.slow:
        return AS_OPENED if present.layout.slow else None
    arranged = arrange(natural, figures.usual, figures.slow)
    if _pairs(present.layout) <= _pairs(figures):
        before = reference_seconds(present, figures)
        if reference_seconds(arranged, figures) > WORTH * before:
            return None
    reason = f"{_change(arranged, natural)}: {describe(figures, natural)}"
    return replace(arranged.layout, reason=reason)


def _change(arranged: Plan, natural: Plan) -> str:
    """``ring order changed to b, a, c``, or what else is new against the opening."""
    ring, tree = arranged.layout.ring, arranged.layout.tree
    if ring != tuple(member.node for member in natural.members):
        return f"ring order changed to {', '.join(ring)}"
    if tree != tuple(natural.members[index].node for index in natural.tree_order):
        return f"tree order changed to {', '.join(tree)}"
    return "other strategies chosen"


def _pairs(layout: Layout) -> set[tuple[str, str]]:
    return {(each.source, each.destination) for each in layout.slow}


def describe(figures: Layout, plan: Plan) -> str:
    """``link b -> c measured 12 MB/s, planned with 118 MB/s``; empty where no link is slow."""
    planned = _rate(1 / plan.links.seconds_per_byte)
    return "; ".join(
        f"link {source} -> {destination} measured {_rate(1 / cost)}, planned with {planned}"
        for source, destination, cost in figures.slow
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"
