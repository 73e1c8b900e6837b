"""Ranks that leave or die while their group gets another epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.agent import Agent
from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_agent.local.rank_connection import Membership
from allfold_agent.membership.failure_protocol import FailureProtocol
from allfold_agent.membership.registration import Registration
from allfold_core.errors import PeerLost
from tests.support.fakes.local_groups import LocalGroups, LocalRank, local_groups
from tests.support.waiting import until

FIRST, SECOND = 3, 4
STRANGER = "a session that has no rank"


class Leaving(Agent):
    """An agent without ports, and what it tells other nodes and the orchestrator."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = set()
        self.registry = Registry()
        self.peers: Any = create_autospec(FailureProtocol, instance=True)
        self.registration: Any = create_autospec(Registration, instance=True)

    def announced_departures(self) -> list[tuple[int, int, int]]:
        """Of each: the number of the epoch, the rank, its last op."""
        calls = [call.args for call in self.peers.announce_departure.await_args_list]
        return [(epoch.number, rank, last_seq) for epoch, rank, last_seq, _ in calls]

    def announced_losses(self) -> list[tuple[int, list[int]]]:
        """Of each: the number of the epoch, and the ranks."""
        calls = [call.args for call in self.peers.announce_loss.await_args_list]
        return [(epoch.number, error.details["ranks"]) for epoch, error in calls]

    def given_up(self) -> list[tuple[int, str]]:
        """Of each seat: the rank, and why."""
        calls = [call.args for call in self.registration.give_up_seat.await_args_list]
        return [(rank, reason) for _, rank, _, reason in calls]


@pytest.fixture
def local() -> Iterator[LocalGroups]:
    """Two ranks of one node, and one of another; the first one has called an op."""
    with local_groups([[0, 1], [2]]) as local:
        local.ranks[0].call(0, [1.0])
        yield local


def shrink(local: LocalGroups) -> None:
    """Install an epoch without the first rank, in which the others have other numbers."""
    local.install([[0], [1]], {1: 0, 2: 1}, first_seq=1)


def membership(rank: LocalRank) -> Membership:
    return Membership(rank.session, rank.group)


def installing(local: LocalGroups, group: Group) -> Any:
    """A ``finish_messages`` for the group that installs an epoch before it does its work."""
    finish = group.finish_messages

    def finish_messages(deadline: float) -> None:
        shrink(local)
        finish(deadline)

    return finish_messages


@pytest.mark.parametrize(("leaver", "last_seq"), [(0, 0), (1, -1)])
def test_a_departure_is_announced_in_its_epoch_though_another_one_is_installed_meanwhile(
    local: LocalGroups, monkeypatch: pytest.MonkeyPatch, leaver: int, last_seq: int
) -> None:
    rank = local.ranks[leaver]
    monkeypatch.setattr(rank.group, "finish_messages", installing(local, rank.group))

    async def run() -> Leaving:
        agent = Leaving()
        await asyncio.wrap_future(agent.leave(membership(rank), "left", failed=False))
        return agent

    agent = asyncio.run(run())
    assert agent.announced_departures() == [(FIRST, leaver, last_seq)]
    assert agent.given_up() == [(leaver, "finished")]
    assert rank.group.current.number == SECOND


@pytest.mark.parametrize("victim", [0, 1])
def test_a_loss_is_announced_in_its_epoch_though_another_one_is_installed_meanwhile(
    local: LocalGroups, victim: int
) -> None:
    async def run() -> Leaving:
        agent = Leaving()
        agent.lose(membership(local.ranks[victim]))
        shrink(local)
        await until(lambda: agent.given_up(), "its seat is given up")
        return agent

    agent = asyncio.run(run())
    assert agent.announced_losses() == [(FIRST, [victim])]
    assert agent.given_up() == [(victim, "lost")]
    assert local.groups[0].current.broken is None


def test_a_rank_that_is_not_in_the_new_epoch_leaves_the_one_that_it_was_in(
    local: LocalGroups,
) -> None:
    shrink(local)

    async def run() -> Leaving:
        agent = Leaving()
        leaver = membership(local.ranks[0])
        await asyncio.wrap_future(agent.leave(leaver, "left", failed=False))
        return agent

    agent = asyncio.run(run())
    assert agent.announced_departures() == [(FIRST, 0, 0)]
    assert agent.given_up() == [(0, "finished")]
    assert local.groups[0].current.left == {}


def test_a_rank_that_dies_is_lost_in_the_newest_epoch_that_has_it(
    local: LocalGroups,
) -> None:
    shrink(local)

    async def run() -> Leaving:
        agent = Leaving()
        for rank in local.ranks[:2]:
            agent.lose(membership(rank))
        await until(lambda: len(agent.given_up()) == 2, "both seats are given up")
        return agent

    agent = asyncio.run(run())
    assert agent.announced_losses() == [(FIRST, [0]), (SECOND, [0])]
    assert isinstance(local.ranks[0].outcome()[1], PeerLost)


def test_a_process_that_has_a_rank_in_no_epoch_leaves_or_dies_without_a_word(
    local: LocalGroups,
) -> None:
    stranger = Membership(STRANGER, local.groups[0])

    async def run() -> Leaving:
        agent = Leaving()
        await asyncio.wrap_future(agent.leave(stranger, "left", failed=False))
        agent.lose(stranger)
        return agent

    agent = asyncio.run(run())
    assert not agent.announced_departures()
    assert not agent.announced_losses()
    assert not agent.given_up()
    assert local.groups[0].current.broken is None


def test_a_call_that_waits_for_the_gpu_of_a_rank_outside_the_epoch_is_no_evidence(
    local: LocalGroups,
) -> None:
    shrink(local)
    group = local.groups[0]
    group.deferred.update((rank.session, 1) for rank in local.ranks[:2])
    evidence = asyncio.run(FailureProtocol.testify(group, 1, 0.0))
    assert evidence["held"] == [0], "the second one, by its new number"
