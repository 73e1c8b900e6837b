"""The other nodes of a group: those that come and go, and links to them that are slow."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from allfold_agent.edges.members import GroupLife, lives_of
from allfold_agent.groups.deadlines import Obstacles
from allfold_control.survival import Rates, pack
from allfold_core.plan import Plan
from allfold_core.pricing.per_link import MOST_NODES
from allfold_core.pricing.slow_links import ChangeLimit, LinkTable, better_layout, describe
from allfold_core.protocol.peer_link import GroupMessage, LinkMessageType
from allfold_core.survival.plans import plan_of
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.topology import AS_OPENED, Layout, Member

if TYPE_CHECKING:
    from allfold_agent.groups.epoch import NodeResources
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
# A rate is told again that is so many times higher or lower than what was told last.
_CHANGED = 1.5
# A link that is still slow is confirmed so often.
_CONFIRM_SECONDS = 60.0
_SLOW = 2.0


class Neighbours(Protocol):
    """The other nodes, as a group needs them. None of these may wait; from any thread."""

    def send(self, node: str, message: GroupMessage) -> None:
        """Send a node a message, which is lost if the link to it is down."""

    def joined(self, group: NodeGroup, members: Collection[Member]) -> None:
        """The group has these nodes from now on."""

    def left_out(self, group: NodeGroup, nodes: Collection[str]) -> None:
        """The group goes on without these nodes."""

    def obstacles(self, group: NodeGroup) -> Obstacles:
        """Return the obstacles to a decision. In the reactor's thread."""

    def group_over(self, group: NodeGroup) -> None:
        """No rank is in the group any more."""


class NodeChanges:
    """The nodes that come into a group, and those without which it goes on.

    It needs links and edges to the first, and those of the others no more.

    Args:
        link: wants links.
        unlink: ends links.
        drop: ends edges.
    """

    def __init__(
        self,
        link: Callable[[Collection[Member]], None],
        unlink: Callable[[Collection[str]], None],
        drop: Callable[[Collection[GroupLife]], None],
    ) -> None:
        self._link = link
        self._unlink = unlink
        self._drop = drop
        self._on_edges: frozenset[GroupLife] = frozenset()

    def actions_between(self, before: Term, now: Term, *, frozen: bool) -> list[Callable[[], None]]:
        """Return what is to be done where one term may have followed another.

        A node that left and came back has another life in the group, and other links and edges.

        Args:
            frozen: until the decision attempts may need the edges of all nodes.
        """
        due: list[Callable[[], None]] = []
        known, present = lives_of(before), lives_of(now)
        gone, new = known - present, {node for node, _ in present - known}
        if gone:
            self._on_edges |= gone
            due.append(partial(self._unlink, [node for node, _ in gone]))
        if new:
            due.append(partial(self._link, [each for each in now.newcomers if each.node in new]))
        if self._on_edges and not frozen:
            due.append(partial(self._drop, self._on_edges))
            self._on_edges = frozenset()
        return due


class SlowLinkWatch:
    """Looks at the links of one group from time to time.

    Args:
        resources: of this node; they say if the order of nodes changes where a link is slow.

    Attributes:
        slow: a sentence on the slow links that the leader knows; ``""`` on other nodes.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self.slow = ""
        self._group = group
        self._opening = group.plan
        self._members = group.members
        self._node = group.node
        self._workers = resources.workers
        # What a background group sends is slow because of others, and not because of a link.
        is_telling = group.plan.options.traffic != "background"
        self._avoid = resources.avoid_slow_links and is_telling
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
        leader = self._group.agreement.term.leader
        if leader != self._leader:
            self._leader = leader
            self._told.clear()
            self._seen.clear()
        rates = self._news(now)
        if leader != self._node:
            self.slow = ""
            if rates:
                self._group.send(leader, LinkMessageType.RATES, pack(Rates(rates)))
            return
        self._heard[self._node] = rates
        while self._heard:
            self._table.record(*self._heard.popitem(), now)
        self._conclude(now)

    def take_rates(self, node: str, rates: Mapping[str, float]) -> None:
        """Take in how fast others send to another node."""
        if node in self._group.agreement.term.voters:
            self._heard.setdefault(node, {}).update(rates)

    def _news(self, now: float) -> dict[str, float]:
        """The rates that the leader does not know yet, or should hear of again."""
        samples, known = self._measured()
        fresh = {
            node: rate for node, rate in known.items() if samples[node] != self._seen.get(node)
        }
        planned = 1 / self._opening.links.seconds_per_byte
        # Ops are priced by the plan's rate; how much faster a link is does not matter.
        fresh = {node: min(found, planned) for node, found in fresh.items()}
        is_slow = any(_SLOW * found < planned for found in fresh.values())
        if not (any(map(self._has_changed, fresh.items())) or (is_slow and now > self._confirm_at)):
            return {}
        self._confirm_at = now + _CONFIRM_SECONDS
        self._told.update(fresh)
        self._seen.update(samples)
        return fresh

    def _measured(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return how often it was measured how fast each node sends, and the rates.

        In both lanes; of two rates the higher one counts, as much may have slowed the other down.
        """
        samples: Counter[str] = Counter()
        known: dict[str, float] = {}
        for rates in (self._group.edges.rates(), self._group.lanes.rates()):
            for node, rate in rates.items():
                samples[node] += rate.samples
                found = rate.bytes_per_second
                if found is not None:
                    known[node] = max(found, known.get(node, 0.0))
        return samples, known

    def _has_changed(self, found: tuple[str, float]) -> bool:
        node, rate = found
        told = self._told.get(node)
        return told is None or not told / _CHANGED < rate < told * _CHANGED

    # As the leader

    def _conclude(self, now: float) -> None:
        term, record = self._group.agreement.term, self._group.current.record
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
            self._workers.submit(partial(self._compare, present, natural, figures, key[:2]))

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
                self._group.event(partial(self._group.agreement.arrange, layout))
        finally:
            self._comparing = False


def describe_layout(plan: Plan) -> str:
    """A sentence on the order of a plan's nodes, and why it is so."""
    return plan.layout.reason or "ring and trees as at the opening: no link is known to be slow"
