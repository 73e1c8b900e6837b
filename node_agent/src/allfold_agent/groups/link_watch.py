"""Slow links of a group: nodes measure and tell the leader, which changes the order of nodes.

All of it runs in the reactor's thread, except the comparison of orders, which takes a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

from allfold_agent.edges.incoming import LinkRate
from allfold_core.plan import Plan
from allfold_core.pricing.per_link import MOST_NODES
from allfold_core.pricing.slow_links import ChangeLimit, LinkTable, better_layout, describe
from allfold_core.survival.plans import plan_of
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.topology import AS_OPENED, Layout, Member

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# A rate is told again that is so many times higher or lower than what was told last.
_CHANGED = 1.5
# A link that is still slow is confirmed so often.
_CONFIRM_SECONDS = 60.0
_SLOW = 2.0


class WatchedGroup(Protocol):
    """The group, as its links concern it."""

    @property
    def term(self) -> Term:
        """The set of nodes that agree."""

    @property
    def record(self) -> Epoch:
        """The current epoch."""

    def rates(self) -> Mapping[str, LinkRate]:
        """By node, how fast it sends to this one."""

    def tell_rates(self, node: str, rates: Mapping[str, float]) -> None:
        """Tell another node how fast others send to this one."""

    def compare(self, task: Callable[[], None]) -> None:
        """Do something that takes a while in another thread."""

    def arrange(self, layout: Layout) -> None:
        """Have the nodes stand in another order; as the leader. From any thread."""


class LinkWatch:
    """Looks at the links of one group from time to time.

    Args:
        opening: the plan with which the group was opened.
        members: all nodes of the group by name.
        node: this one.
        avoid: have the nodes stand in another order where a link is slow.

    Attributes:
        slow: a sentence on the slow links that the leader knows; ``""`` on other nodes.
    """

    def __init__(
        self,
        opening: Plan,
        members: Mapping[str, Member],
        node: str,
        group: WatchedGroup,
        *,
        avoid: bool,
    ) -> None:
        self.slow = ""
        self._opening = opening
        self._members = members
        self._node = node
        self._group = group
        self._avoid = avoid
        self._table = LinkTable()
        self._limit = ChangeLimit()
        self._next_look = 0.0
        self._leader = ""
        self._heard: dict[str, dict[str, float]] = {}
        self._told: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._confirm_at = 0.0
        self._considered: object = None
        self._comparing = False
        self._arranged: object = None  # the term and stamp for which other orders were asked for
        self._nodes = frozenset[str]()
        self._layout = AS_OPENED
        self._shown: set[tuple[str, str]] = set()

    def look(self, now: float) -> None:
        """Tell the leader what is new; as the leader, draw the conclusions."""
        if now < self._next_look or not 1 < len(self._members) <= MOST_NODES:
            return
        self._next_look = now + LOOK_SECONDS
        leader = self._group.term.leader
        if leader != self._leader:
            self._leader = leader
            self._told.clear()
            self._seen.clear()
        rates = self._news(now)
        if leader != self._node:
            self.slow = ""
            if rates:
                self._group.tell_rates(leader, rates)
            return
        self._heard[self._node] = rates
        while self._heard:
            self._table.record(*self._heard.popitem(), now)
        self._conclude(now)

    def note(self, node: str, rates: Mapping[str, float]) -> None:
        """Another node tells how fast others send to it."""
        if node in self._group.term.voters:
            self._heard.setdefault(node, {}).update(rates)

    def _news(self, now: float) -> dict[str, float]:
        """The rates that the leader does not know yet, or should hear of again."""
        fresh: dict[str, float] = {}
        for node, rate in self._group.rates().items():
            found = rate.bytes_per_second
            if found is not None and rate.samples != self._seen.get(node):
                fresh[node] = found
        planned = 1 / self._opening.links.seconds_per_byte
        # Ops are priced by the plan's rate; how much faster a link is does not matter.
        fresh = {node: min(found, planned) for node, found in fresh.items()}
        is_slow = any(_SLOW * found < planned for found in fresh.values())
        if not (any(map(self._has_changed, fresh.items())) or (is_slow and now > self._confirm_at)):
            return {}
        self._confirm_at = now + _CONFIRM_SECONDS
        self._told.update(fresh)
        self._seen.update((node, rate.samples) for node, rate in self._group.rates().items())
        return fresh

    def _has_changed(self, found: tuple[str, float]) -> bool:
        node, rate = found
        told = self._told.get(node)
        return told is None or not told / _CHANGED < rate < told * _CHANGED

    # As the leader

    def _conclude(self, now: float) -> None:
        term, record = self._group.term, self._group.record
        natural = plan_of(self._opening, replace(record, layout=AS_OPENED), self._members)
        self._table.adopt(record.layout, now)
        figures = self._table.figures(natural, now)
        self._show(figures, natural)
        self._note_changes(record, now)
        key = (term.number, record.stamp, figures)
        if not self._avoid or key == self._considered or not self._may_change(key[:2], now):
            return
        self._considered = key
        if figures.slow or record.layout.slow:
            present = plan_of(self._opening, record, self._members)
            self._comparing = True
            self._group.compare(partial(self._compare, present, natural, figures, key[:2]))

    def _note_changes(self, record: Epoch, now: float) -> None:
        if record.layout != self._layout:
            self._layout = record.layout
            self._limit.count_change(now)
        if record.nodes != self._nodes:
            # The order is that of before without the lost nodes: it may go over a slow link again.
            self._nodes, self._limit = record.nodes, ChangeLimit()

    def _may_change(self, basis: tuple[int, Stamp], now: float) -> bool:
        """Return True if no change is on its way and the last one was long enough ago."""
        return not self._comparing and basis != self._arranged and self._limit.allows(now)

    def _show(self, figures: Layout, natural: Plan) -> None:
        self.slow = describe(figures, natural)
        before, self._shown = self._shown, {each[:2] for each in figures.slow}
        if not self._shown <= before:
            log.warning("group '%s': %s", self._opening.group, self.slow)

    def _compare(
        self, present: Plan, natural: Plan, figures: Layout, basis: tuple[int, Stamp]
    ) -> None:
        try:
            layout = better_layout(present, natural, figures)
            if layout is not None:
                self._arranged = basis
                self._group.arrange(layout)
        finally:
            self._comparing = False


def describe_layout(plan: Plan) -> str:
    """A sentence on the order of a plan's nodes, and why it is so."""
    return plan.layout.reason or "ring and trees as at the opening: no link is known to be slow"
