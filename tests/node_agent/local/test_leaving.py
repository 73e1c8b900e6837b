"""Ranks that leave or die: their seats are given up, and their group goes on or is over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.groups.flight_recorder import Recordings
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.joins import Joins
from allfold_agent.local.rank_connection import LocalMembership
from allfold_agent.membership.draining import NodeDrain
from allfold_agent.membership.group_links import GroupLinks
from allfold_agent.membership.seats import RankSeats
from allfold_agent.observation.failures import ExitObserver
from allfold_agent.observation.incidents import Incidents
from allfold_agent.registrar import ControlTasks, RankRegistrar
from allfold_core.errors import Evicted, PeerLost
from tests.support.fakes.local_groups import LocalGroups, local_groups
from tests.support.fakes.local_rank import LocalRank
from tests.support.waiting import until

EXCEPTION = "ended with an exception (ValueError: boom)"


class Leaving(RankRegistrar):
    """A registrar, and what it tells the orchestrator."""

    def __init__(self, local: LocalGroups) -> None:
        self.registry = GroupRegistry()
        self.seats: Any = create_autospec(RankSeats, instance=True)
        self.group_links: Any = create_autospec(GroupLinks, instance=True)
        super().__init__(
            ControlTasks(),
            self.registry,
            create_autospec(Joins, instance=True),
            self.seats,
            create_autospec(NodeDrain, instance=True),
            ExitObserver(Incidents("node0", lambda _: None)),
            Recordings(),
            self.group_links,
        )
        self.registry.open(local.groups[0].plan, lambda: local.groups[0])

    def given_up(self) -> list[tuple[int, str]]:
        """Of each seat: its number, and why."""
        calls = [call.args for call in self.seats.give_up_seat.await_args_list]
        return [(seat, reason) for _, seat, _, reason in calls]


@pytest.fixture
def local() -> Iterator[LocalGroups]:
    """Two ranks of one node, and one of another; the first one has called an op."""
    with local_groups([[0, 1], [2]]) as local:
        local.ranks[0].call(0, [1.0])
        yield local


def membership(rank: LocalRank) -> LocalMembership:
    return LocalMembership(rank.session, rank.group)


def sessions(local: LocalGroups) -> list[tuple[str, ...]]:
    """Of each node: the members of its group."""
    return [group.current.plan.sessions for group in local.groups]


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize(
    ("how", "failed", "reason"),
    [("left the group", False, "finished"), (EXCEPTION, True, "lost")],
)
def test_a_rank_has_left_when_its_node_and_the_orchestrator_know(
    local: LocalGroups, leaver: int, how: str, failed: bool, reason: str
) -> None:
    async def run() -> Leaving:
        agent = Leaving(local)
        await asyncio.wrap_future(agent.leave(membership(local.ranks[leaver]), how, failed))
        return agent

    agent = asyncio.run(run())
    assert agent.given_up() == [(leaver, reason)]
    left = tuple(rank.session for rank in local.ranks if rank.rank != leaver)
    assert sessions(local)[0] == left
    other = local.ranks[2]
    other.call(0, [1.0])
    error = other.outcome()[1]
    assert isinstance(error, PeerLost)
    assert f"rank {leaver} on node node0, which {how}" in error.message


def test_a_seat_has_its_number_in_the_plan_though_the_group_has_other_numbers_by_now(
    local: LocalGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = local.ranks[1]
    finish = rank.group.p2p.finish

    def finish_messages(deadline: float) -> None:
        local.lose(0)
        finish(deadline)

    monkeypatch.setattr(rank.group.p2p, "finish", finish_messages)

    async def run() -> Leaving:
        agent = Leaving(local)
        await asyncio.wrap_future(agent.leave(membership(rank), "left the group", failed=False))
        return agent

    agent = asyncio.run(run())
    assert agent.given_up() == [(1, "finished")]
    assert sessions(local)[0] == (local.ranks[2].session,)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_seat_of_a_rank_that_dies_is_given_up_and_the_group_goes_on(
    local: LocalGroups, victim: int
) -> None:
    async def run() -> Leaving:
        agent = Leaving(local)
        agent.lose(membership(local.ranks[victim]))
        await until(lambda: agent.given_up(), "its seat is given up")
        await until(lambda: {*map(len, sessions(local))} == {2}, "all nodes know")
        return agent

    agent = asyncio.run(run())
    assert agent.given_up() == [(victim, "lost")]
    assert [group.evicted for group in local.groups] == [None, None]
    assert agent.registry.all() == [local.groups[0]]


def test_a_group_that_is_over_is_closed_and_needs_no_links(local: LocalGroups) -> None:
    async def run() -> Leaving:
        agent = Leaving(local)
        agent.group_over(local.groups[0])
        await until(lambda: not agent.registry.all(), "it is closed")
        return agent

    agent = asyncio.run(run())
    agent.group_links.over.assert_called_once_with(local.groups[0])


def test_a_group_without_this_node_is_closed_when_its_last_local_rank_leaves(
    local: LocalGroups,
) -> None:
    """Nothing can be agreed upon any more, so nobody waits for that."""
    local.links.cut("node0")
    local.groups[0].evict(Evicted("the group goes on without node0"))

    async def run() -> Leaving:
        agent = Leaving(local)
        first, second = (membership(rank) for rank in local.ranks[:2])
        await asyncio.wrap_future(agent.leave(first, "left the group", failed=False))
        assert agent.registry.all() == [local.groups[0]]
        agent.lose(second)
        await until(lambda: not agent.registry.all(), "it is closed")
        return agent

    agent = asyncio.run(run())
    assert agent.given_up() == [(0, "finished"), (1, "lost")]


def test_who_leaves_does_not_wait_for_ever_for_a_node_that_is_silent(
    local: LocalGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.registrar._DEPARTURE_SECONDS", 0.05)
    local.links.cut("node1")

    async def run() -> Leaving:
        agent = Leaving(local)
        leaver = membership(local.ranks[0])
        await asyncio.wrap_future(agent.leave(leaver, "left the group", failed=False))
        return agent

    assert asyncio.run(run()).given_up() == [(0, "finished")]
