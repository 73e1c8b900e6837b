"""A node of a machine with too much to do, as its pings were recorded, is not suspected."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest

from allfold_core.survival import suspicion
from allfold_core.survival.suspicion import (
    PATIENCE_SECONDS,
    PONG_FACTOR,
    PONG_WINDOW_SECONDS,
    Action,
    Observation,
    RecentMaximum,
    Suspicion,
)

RECORDED = Path(__file__).with_name("pongs_of_a_busy_machine.csv")
TICK = 0.05
NEVER = float("inf")


def recorded() -> list[tuple[float, float]]:
    """The times at which each ping was sent and answered."""
    lines = [line for line in RECORDED.read_text().splitlines() if line[0] != "#"]
    pings = [(int(each["sent"]), int(each["took"])) for each in csv.DictReader(lines)]
    return [(sent / 1000, (sent + took) / 1000) for sent, took in pings]


def false_suspicions(pings: list[tuple[float, float]]) -> list[float]:
    """The times at which an observer without lag, which only hears answers, suspects the node."""
    suspect, worst = Suspicion(), RecentMaximum(PONG_WINDOW_SECONDS)
    now, sent, answered, suspected = 0.0, 0, 0, list[float]()
    while now < pings[-1][0]:
        while sent < len(pings) and pings[sent][0] <= now:
            sent += 1
        while answered < sent and pings[answered][1] <= now:
            began, ended = pings[answered]
            worst.note(ended, ended - began)
            answered += 1
        heard = pings[answered - 1][1] if answered else 0.0
        seen = Observation(heard, sent - answered, worst.at(now))
        if suspect.decide(now, seen) is Action.SUSPECT_SILENT:
            suspected.append(now)
        now += TICK
    return suspected


def test_the_recorded_node_was_silent_for_longer_than_an_idle_one_may_be() -> None:
    answers = [answered for _, answered in recorded()]
    assert max(later - earlier for earlier, later in pairwise(answers)) > PATIENCE_SECONDS


def test_a_node_that_was_slow_of_late_is_not_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert false_suspicions(recorded()) == []
    monkeypatch.setattr(suspicion, "PONG_FACTOR", 0.0)
    assert false_suspicions(recorded()) != []


def test_the_recorded_node_is_suspected_in_time_once_it_stops() -> None:
    pings, stop = recorded(), 30.0
    stopped = [(sent, answered if sent < stop else NEVER) for sent, answered in pings]
    worst = max(answered - sent for sent, answered in pings if sent < stop)
    (suspected,) = false_suspicions(stopped)
    assert stop < suspected <= stop + max(PATIENCE_SECONDS, PONG_FACTOR * worst) + 2 * TICK
