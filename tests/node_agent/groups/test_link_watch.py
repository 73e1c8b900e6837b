"""Nodes measure their links, the leader hears of it, and a slow one is planned around."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from threading import Event

import numpy as np
import pytest

from allfold_agent.control.status import describe_group
from allfold_agent.groups.neighbours import LOOK_SECONDS
from allfold_core.pricing.slow_links import BELIEVED_SECONDS
from allfold_core.protocol.peer_link import LinkMessageType
from allfold_core.topology import AS_OPENED, LinkModel
from tests.support.fakes.damaged_wire import DamagedWire
from tests.support.fakes.local_groups import LocalGroups, local_groups, make_plan
from tests.support.fakes.local_rank import SECONDS
from tests.support.waiting import wait_until

RATE = 100e6
RANKS = [[0], [1], [2]]
SLOW = "link node1 -> node2 measured 10 MB/s, planned with 100 MB/s"


class Watched:
    """Groups whose links are what a test says, and whose clock it moves."""

    def __init__(self, local: LocalGroups) -> None:
        self.local = local
        self.now = 1000.0
        # Every edge is opened: a tensor goes from each node to each other one.
        local.call_all(0, [[1.0]] * len(local.ranks), strategy="direct")
        assert all(rank.outcome()[1] is None for rank in local.ranks)

    def measure(self, source: int, destination: int, rate: float) -> None:
        found = self.local.groups[destination].edges.rates()[f"node{source}"]
        for _ in range(5):
            found.add_sample(4 << 20, (4 << 20) / rate)

    def measure_all(self, rate: float) -> None:
        nodes = range(len(self.local.groups))
        for source in nodes:
            for destination in nodes:
                if source != destination:
                    self.measure(source, destination, rate)

    def look(self, after: float = LOOK_SECONDS) -> None:
        """Have all nodes look at their links, the leader last: then it has heard of everything.

        Returns when it has compared orders as well: while it does, it concludes nothing.
        """
        self.now += after
        for group in reversed(self.local.groups):
            group.link_watch.look(self.now)
            self._await_messages()
        leader = self.local.groups[0].link_watch
        wait_until(lambda: not leader._comparing, "the leader has compared orders")

    def _await_messages(self) -> None:
        """Return when the leader has taken in what it was sent."""
        taken_in = Event()
        self.local.reactors[0].call(taken_in.set)
        assert taken_in.wait(SECONDS)

    @property
    def rings(self) -> set[tuple[str, ...]]:
        return {
            tuple(member.node for member in group.current.plan.members)
            for group in self.local.groups
        }

    def await_ring(self, *nodes: int) -> None:
        ring = tuple(f"node{node}" for node in nodes)
        wait_until(lambda: self.rings == {ring}, f"the ring is {ring}")


@pytest.fixture
def watched() -> Iterator[Watched]:
    plan = replace(make_plan(RANKS), links=LinkModel(seconds_per_byte=1 / RATE))
    with local_groups(RANKS, plan=plan) as local:
        yield Watched(local)


def test_the_nodes_stand_in_an_order_without_the_slow_link(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.measure_all(RATE)
    watched.measure(1, 2, RATE / 10)
    with caplog.at_level(logging.WARNING):
        watched.look()
        watched.await_ring(1, 0, 2)
    told = f"group 'test' epoch 0: ring order changed to node1, node0, node2: {SLOW}"
    assert caplog.messages.count(told) == 3
    for group in watched.local.groups:
        assert (
            describe_group(group)["layout"] == f"ring order changed to node1, node0, node2: {SLOW}"
        )
        assert describe_group(group)["epoch"] == 0
    assert describe_group(watched.local.groups[0])["slow_links"] == SLOW
    watched.local.call_all(1, [[1.0]] * 3, strategy="ring")
    assert [rank.outcome() for rank in watched.local.ranks] == [(1, None)] * 3
    assert [rank.result(1) for rank in watched.local.ranks] == [[3.0]] * 3


def test_the_nodes_of_a_background_group_stay_where_they_are_as_its_rates_are_those_of_others() -> (
    None
):
    plan = make_plan(RANKS)
    plan = replace(
        plan,
        links=LinkModel(seconds_per_byte=1 / RATE),
        options=replace(plan.options, traffic="background"),
    )
    with local_groups(RANKS, plan=plan) as local:
        watched = Watched(local)
        watched.measure_all(RATE)
        watched.measure(1, 2, RATE / 10)
        watched.look()
        assert watched.rings == {("node0", "node1", "node2")}
        assert describe_group(local.groups[0])["slow_links"] == SLOW


def test_nothing_is_said_of_links_that_stay_as_they_are(watched: Watched) -> None:
    watched.measure_all(RATE)
    watched.look()
    first = watched.local.links.count(LinkMessageType.RATES)
    assert first == 2, "each node has told the leader once"
    for _ in range(5):
        watched.measure_all(0.8 * RATE)
        watched.look()
    assert watched.local.links.count(LinkMessageType.RATES) == first
    assert watched.local.rounds == 0
    assert describe_group(watched.local.groups[0])["slow_links"] == ""


def test_on_a_busy_machine_the_order_stays(watched: Watched) -> None:
    for each in range(4):
        watched.measure_all(RATE / (10 + each))
        watched.look(100.0)
    assert watched.local.rounds == 0


def test_a_slow_link_that_is_not_used_is_tried_again(watched: Watched) -> None:
    watched.measure_all(RATE)
    watched.measure(1, 2, RATE / 10)
    watched.look()
    watched.await_ring(1, 0, 2)
    watched.look()
    watched.look(BELIEVED_SECONDS - 2)
    assert watched.rings == {("node1", "node0", "node2")}
    watched.look(10.0)
    watched.await_ring(0, 1, 2)
    assert all(group.current.record.layout == AS_OPENED for group in watched.local.groups)
    watched.look()
    watched.measure(1, 2, RATE / 10)
    watched.look(100.0)
    watched.await_ring(1, 0, 2)


def test_two_nodes_have_no_other_order_but_the_slow_link_is_shown() -> None:
    ranks = [[0], [1]]
    plan = replace(make_plan(ranks), links=LinkModel(seconds_per_byte=1 / RATE))
    with local_groups(ranks, plan=plan) as local:
        watched = Watched(local)
        watched.measure(0, 1, RATE / 10)
        watched.measure(1, 0, RATE)
        watched.look()
        told = "link node0 -> node1 measured 10 MB/s, planned with 100 MB/s"
        assert describe_group(local.groups[0])["slow_links"] == told
        assert local.rounds == 0


def test_a_slow_link_is_only_shown_where_that_was_asked_for(watched: Watched) -> None:
    watched.local.groups[0].link_watch._avoid = False
    watched.measure_all(RATE)
    watched.measure(1, 2, RATE / 10)
    watched.look()
    watched.look()
    assert describe_group(watched.local.groups[0])["slow_links"] == SLOW
    assert watched.local.rounds == 0


@pytest.mark.parametrize("nbytes", [8 << 20, 256 << 10], ids=["long frames", "short frames"])
def test_what_comes_over_a_network_is_measured(nbytes: int) -> None:
    values = np.ones(nbytes // 4, np.float32)
    with local_groups([[0], [1]], wire=DamagedWire(repeat(None))) as local:
        for seq in range((15 << 20) // nbytes):
            local.call_all(seq, [values, values])
            assert [rank.outcome() for rank in local.ranks] == [(seq, None)] * 2
        samples = [rate.samples for group in local.groups for rate in group.edges.rates().values()]
        assert len(samples) == 2
        assert min(samples) >= 1


def test_within_a_machine_there_is_no_link_to_measure() -> None:
    values = np.ones(2 << 20, np.float32)
    with local_groups([[0], [1]]) as local:
        local.call_all(0, [values, values])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        rates = [rate for group in local.groups for rate in group.edges.rates().values()]
        assert [rate.samples for rate in rates] == [0, 0]
