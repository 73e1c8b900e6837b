"""Overloaded nodes, and an overloaded observer, on a clock of the test: the dead are suspected."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable

import pytest

from allfold_agent.membership.peer_monitor import TICK_SECONDS
from allfold_core.survival.suspicion import LONGEST_PATIENCE_SECONDS, PATIENCE_SECONDS
from tests.node_agent.membership.scripted_links import PING_SECONDS, ScriptedLinks

SECONDS = 120.0
SEEDS = pytest.mark.parametrize("seed", range(10))
LONGEST_STALL = 0.5


def overloaded(random_: random.Random, now: float) -> Callable[[float], bool]:
    """A node that does nothing for up to half a second, again and again; more and more at first."""
    changes, time, most = [now], now, 0.1
    while time < now + 2 * SECONDS:
        time += random_.expovariate(1 / 0.05)
        changes.append(time)
        time += random_.uniform(most / 2, most)
        changes.append(time)
        most = random_.uniform(0.1, min(LONGEST_STALL, 3 * most))
    return lambda at: bisect_right(changes, at) % 2 == 1


@SEEDS
def test_overloaded_nodes_are_not_suspected(seed: int) -> None:
    random_, links = random.Random(seed), ScriptedLinks("b", "c", "d")
    for node in links.nodes.values():
        node.answers = overloaded(random_, links.now)
    links.run(SECONDS)
    assert max(node.pings.worst_delay(links.now) for node in links.nodes.values()) > 0.2
    assert links.suspicions.made == []


@SEEDS
def test_an_overloaded_observer_suspects_nobody_for_its_own_stalls(seed: int) -> None:
    random_, links = random.Random(seed), ScriptedLinks("b", "c")
    links.nodes["c"].answers = overloaded(random_, links.now)
    links.run(10.0)
    for _ in range(100):
        links.stall(random_.uniform(0.0, 10 * LONGEST_STALL))
        links.run(random_.expovariate(1.0))
    assert links.suspicions.made == []


@SEEDS
def test_of_overloaded_nodes_the_one_that_stops_is_suspected_within_its_patience(seed: int) -> None:
    random_, links = random.Random(seed), ScriptedLinks("b", "c")
    for node in links.nodes.values():
        node.answers = overloaded(random_, links.now)
    links.run(random_.uniform(20.0, SECONDS))
    links.stall(LONGEST_STALL)
    patience = max(PATIENCE_SECONDS, 6 * links.nodes["b"].pings.worst_delay(links.now))
    links.nodes["b"].answers = lambda _: False
    links.run(min(patience, LONGEST_PATIENCE_SECONDS) + LONGEST_STALL + PING_SECONDS + TICK_SECONDS)
    assert links.suspicions.made == [("b", "silent")]


@SEEDS
def test_an_idle_node_that_stops_is_suspected_after_the_shortest_patience(seed: int) -> None:
    random_, links = random.Random(seed), ScriptedLinks("b")
    links.run(random_.uniform(0.0, 20.0))
    links.nodes["b"].answers = lambda _: False
    links.run(PATIENCE_SECONDS - PING_SECONDS - 2 * TICK_SECONDS)
    assert links.suspicions.made == []
    links.run(PING_SECONDS + 3 * TICK_SECONDS)
    assert links.suspicions.made == [("b", "silent")]
