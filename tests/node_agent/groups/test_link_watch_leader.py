"""The conclusions of a group's leader from the rates that it is told, change by change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from allfold_agent.groups.epoch import NodeResources
from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.neighbours import SlowLinkWatch
from allfold_core.survival.plans import first_epoch, first_term, plan_of
from allfold_core.survival.records import Epoch
from allfold_core.topology import Layout, LinkModel
from tests.support.fakes.local_groups import make_plan

RATE = 100e6
OPENING = replace(make_plan([[0], [1], [2], [3], [4]]), links=LinkModel(seconds_per_byte=1 / RATE))
MEMBERS = {member.node: member for member in OPENING.members}
NODES = list(MEMBERS)


class Led:
    """The group of node4, which leads it: what it wants is kept until the test does it."""

    def __init__(self) -> None:
        self.term = replace(first_term(OPENING), voters=("node4", *NODES[:4]))
        self.record = first_epoch(OPENING)
        self.comparisons: list[Callable[[], None]] = []
        self.wanted: list[Layout] = []
        # As much of the group, and of its node, as the watch needs.
        self.plan, self.members, self.node = OPENING, MEMBERS, "node4"
        self.agreement = self.current = self
        self.edges = self.lanes = SimpleNamespace(rates=dict)
        self.arrange = self.wanted.append
        workers = SimpleNamespace(submit=self.comparisons.append)
        resources = SimpleNamespace(workers=workers, avoid_slow_links=True)
        self.watch = SlowLinkWatch(cast(NodeGroup, self), cast(NodeResources, resources))
        self.now = 1000.0

    def event(self, action: Callable[[], None]) -> None:
        action()

    def send(self, *_: object) -> None:
        pytest.fail("the leader tells nobody")

    def look(self, slow: float = RATE / 10) -> None:
        """Look a second later, when all have measured; node1 -> node2 at a rate of its own."""
        self.now += 1.0
        nodes = self.term.voters
        for node in nodes:
            others = dict.fromkeys((each for each in nodes if each != node), RATE)
            self.watch.take_rates(node, others | ({"node1": slow} if node == "node2" else {}))
        self.watch.look(self.now)

    def compare_all(self) -> list[Layout]:
        """Make the comparisons that were begun; return what is wanted of the nodes then."""
        comparisons, wanted = [*self.comparisons], self.wanted
        self.comparisons.clear()
        wanted.clear()
        for each in comparisons:
            each()
        return [*wanted]

    def install(self, layout: Layout) -> None:
        """A round has made an epoch of this layout."""
        stamp = self.record.stamp
        after = stamp._replace(round=stamp.round + 1)
        self.record = replace(self.record, stamp=after, layout=layout)

    def ring(self) -> list[str]:
        members = plan_of(OPENING, self.record, MEMBERS).members
        return [member.node for member in [*members, members[0]]]


def without(record: Epoch, node: str) -> Epoch:
    return replace(record, seats=tuple(seat for seat in record.seats if seat.node != node))


def test_after_a_loss_the_nodes_stand_around_the_slow_link_at_once() -> None:
    led = Led()
    led.look()
    (layout,) = led.compare_all()
    led.install(layout)
    led.look()
    assert led.ring()[:3] == ["node1", "node0", "node2"]
    led.record = without(led.record, "node0")
    led.install(layout)
    assert ("node1", "node2") in pairwise(led.ring())
    led.look()
    (layout,) = led.compare_all()
    led.install(layout)
    assert ("node1", "node2") not in pairwise(led.ring())


def test_a_change_that_was_lost_with_the_term_is_made_in_the_next_one_at_once() -> None:
    led = Led()
    led.look()
    assert len(led.compare_all()) == 1
    led.term = replace(led.term, number=led.term.number + 1)
    led.look()
    assert len(led.compare_all()) == 1


def test_there_is_one_comparison_and_one_change_at_a_time() -> None:
    led = Led()
    led.look()
    led.look(RATE / 20)
    assert len(led.comparisons) == 1
    (layout,) = led.compare_all()
    led.look(RATE / 40)
    assert not led.comparisons, "the change has not come yet"
    led.install(layout)
    led.look(RATE / 80)
    assert not led.comparisons, "the last change was a moment ago"
    led.now += 10.0
    led.look(RATE / 80)
    assert len(led.comparisons) == 1
