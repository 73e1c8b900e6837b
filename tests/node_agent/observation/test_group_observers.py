"""The observers of one group, given what its flight recorder and its connections say."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from allfold_agent.observation import link_observer
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.link_observer import LinkObserver
from allfold_agent.observation.samples import GroupSampler
from allfold_agent.observation.speed_observer import WINDOW_SECONDS, SpeedObserver
from allfold_core.diagnosis.links import LinkSample, LinkTrouble
from allfold_core.incident import Cause, Incident
from tests.node_agent.observation.groups import (
    as_group,
    completed,
    enter_epoch,
    observed_group,
)

STEP = 0.05
SLOW = 0.04  # of a step of which the others compute a millisecond


@pytest.fixture
def told() -> list[Incident]:
    return []


@pytest.fixture
def incidents(told: list[Incident]) -> Incidents:
    return Incidents("a", told.append)


class Training:
    """Steps of a group on one node; one rank computes longer than the others."""

    def __init__(self, incidents: Incidents, world: int) -> None:
        self.now = 100.0
        self.epoch, self.world, self.seq = 0, world, 0
        self.group = observed_group(dict.fromkeys(range(world), "a"))
        self.sampler = GroupSampler(as_group(self.group), self.now)
        self._speeds = SpeedObserver(as_group(self.group), incidents, self.sampler, self.now)

    def train(self, windows: int, slow: int) -> None:
        """Do steps for some windows of the observer."""
        until = self.now + windows * WINDOW_SECONDS
        while self.now < until:
            arrivals = {rank: SLOW if rank == slow else 0.0 for rank in range(self.world)}
            self.group.outcomes.recent.append(
                completed(self.seq, self.epoch, self.now + 0.001, arrivals)
            )
            self.seq += 1
            self.now += STEP
            self.sampler.look(self.now, self.now)
            self._speeds.look(self.now, self.now, {})

    def lose_a_rank(self) -> None:
        """Go on with one rank less; those above it have other numbers."""
        self.epoch, self.world = self.epoch + 1, self.world - 1
        enter_epoch(self.group, self.epoch, dict.fromkeys(range(self.world), "a"))


def test_a_slow_rank_is_named_by_the_time_that_it_takes_between_ops(
    incidents: Incidents, told: list[Incident]
) -> None:
    Training(incidents, world=3).train(windows=3, slow=2)
    (found,) = incidents.open_ones()
    assert (found.cause, found.culprit.rank) == (Cause.SLOW_RANK, 2)
    assert found.evidence["own"] == pytest.approx(SLOW, abs=0.02)


def test_no_rank_is_blamed_for_what_another_did_before_ranks_had_new_numbers(
    incidents: Incidents, told: list[Incident]
) -> None:
    training = Training(incidents, world=4)
    training.train(windows=3, slow=2)
    assert [each.culprit.rank for each in incidents.open_ones()] == [2]
    training.lose_a_rank()
    training.train(windows=1, slow=-1)
    assert incidents.open_ones() == []


def test_own_times_are_not_measured_from_one_epoch_to_the_next(incidents: Incidents) -> None:
    training = Training(incidents, world=2)
    training.train(windows=1, slow=-1)
    training.sampler.take_window(training.now)
    training.epoch += 1
    training.group.outcomes.recent.append(
        completed(training.seq, training.epoch, training.now, {0: 0.0, 1: 0.0})
    )
    training.sampler.look(training.now, training.now)
    assert training.sampler.take_window(training.now + 1.0) == {}


# Links


@pytest.fixture
def connected() -> Iterator[socket.socket]:
    with socket.socket() as one:
        yield one


class Troubles:
    """A watch of the only connection, which finds what a test says."""

    def __init__(self) -> None:
        self.now: LinkTrouble | None = None

    def judge(self, _: LinkSample) -> LinkTrouble | None:
        return self.now


LOSSY = LinkTrouble(Cause.LOSSY_LINK, "loses packets", {})
SLOW_LINK = LinkTrouble(Cause.SLOW_LINK, "is slow", {"rate": 1e6})


@pytest.fixture
def troubles(monkeypatch: pytest.MonkeyPatch) -> Troubles:
    found = Troubles()
    monkeypatch.setattr(link_observer, "ConnectionWatch", lambda: found)
    monkeypatch.setattr(link_observer, "sample", lambda _: object())
    return found


def test_a_link_that_is_slow_is_reported_at_the_second_look_and_told_to_its_other_end(
    incidents: Incidents, troubles: Troubles, connected: socket.socket
) -> None:
    group = observed_group({0: "a", 1: "b"})
    group.sockets.append(("b", connected))
    observer = LinkObserver(as_group(group), incidents)
    troubles.now = SLOW_LINK
    observer.look(1.0, 101.0)
    assert incidents.open_ones() == []
    observer.look(1.25, 101.25)
    assert [str(each.culprit) for each in incidents.open_ones()] == [
        "the link from node a to node b"
    ]
    assert group.sent == [("b", {"link": {"rate": 1e6}})] * 2
    troubles.now = None
    observer.look(1.5, 101.5)
    assert incidents.open_ones() == []


def test_a_lossy_link_that_becomes_slow_stays_one_incident(
    incidents: Incidents, told: list[Incident], troubles: Troubles, connected: socket.socket
) -> None:
    group = observed_group({0: "a", 1: "b"})
    group.sockets.append(("b", connected))
    observer = LinkObserver(as_group(group), incidents)
    for now, trouble in enumerate((LOSSY, SLOW_LINK, SLOW_LINK, LOSSY)):
        troubles.now = trouble
        observer.look(float(now), 100.0 + now)
    assert len({each.id for each in told}) == 1
    assert all(each.is_open for each in told)


def test_a_link_whose_other_end_is_slower_still_is_not_blamed(
    incidents: Incidents, troubles: Troubles, connected: socket.socket
) -> None:
    """Then it is the acknowledgements that are slow."""
    group = observed_group({0: "a", 1: "b"})
    group.sockets.append(("b", connected))
    observer = LinkObserver(as_group(group), incidents)
    troubles.now = SLOW_LINK
    for now in (1.0, 1.25, 1.5):
        observer.hear("b", {"rate": 1e5}, now)
        observer.look(now, 100.0 + now)
    assert incidents.open_ones() == []
