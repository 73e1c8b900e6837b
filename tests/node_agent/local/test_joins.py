"""A rank may die at any moment of its registration: its seat is given back or reported lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.groups.group import NodeGroup
from allfold_agent.groups.registry import GroupRegistry
from allfold_agent.joins import Joins
from allfold_agent.local.memberships import PROCESS_ENDED, JoinResult
from allfold_agent.local.rank_connection import LocalMembership
from allfold_agent.membership.group_terms import EarlyNotices, GroupTerms
from allfold_agent.membership.seats import Entry, RankSeats, check_request
from allfold_agent.registrar import ControlTasks, RankRegistrar
from allfold_core.errors import InvalidArgument, PeerMissing
from tests.support.fakes.local_groups import local_groups

REQUEST = {"group": "test", "rank": 3, "session": "s", "init_timeout": 5.0}


class Joining(RankRegistrar):
    """A registrar whose joins end as a test says."""

    def __init__(self, dies_before_the_end: bool, outcome: JoinResult | Exception) -> None:
        joins: Any = create_autospec(Joins, instance=True)
        joins.join.side_effect = self._join
        nothing: Any = None
        super().__init__(
            ControlTasks(), GroupRegistry(), joins, nothing, nothing, nothing, nothing, nothing
        )
        self.dies = dies_before_the_end
        self.outcome = outcome
        self.lost: list[LocalMembership] = []
        self.complete = asyncio.Event()
        self.withdrawn = False
        self.future = self.join(REQUEST)

    async def _join(self, request: dict[str, Any], *, is_new: bool) -> JoinResult:
        try:
            await self.complete.wait()
        except asyncio.CancelledError:
            self.withdrawn = True
            raise
        if self.dies:  # too late to cancel this, too early to have the answer
            assert self.future.cancel()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def lose(
        self, membership: LocalMembership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        self.lost.append(membership)


@pytest.fixture
def group() -> Iterator[NodeGroup]:
    with local_groups([[0, 1, 2, 3]]) as local:
        yield local.groups[0]


def admission_to(group: NodeGroup) -> JoinResult:
    return JoinResult(group, group.current)


async def join(
    outcome: JoinResult | Exception, *, dies_before_the_end: bool = False
) -> tuple[Joining, Future[JoinResult]]:
    agent = Joining(dies_before_the_end, outcome)
    await settled()
    return agent, agent.future


async def complete(agent: Joining) -> None:
    agent.complete.set()
    await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_rank_that_dies_as_its_join_completes_is_lost(group: NodeGroup) -> None:
    async def run() -> Joining:
        agent, _ = await join(admission_to(group), dies_before_the_end=True)
        await complete(agent)
        return agent

    agent = asyncio.run(run())
    assert [(each.session, each.group) for each in agent.lost] == [("s", group)]


def test_a_rank_that_dies_while_it_joins_is_withdrawn(group: NodeGroup) -> None:
    async def run() -> tuple[Joining, Future[JoinResult]]:
        agent, future = await join(admission_to(group))
        await settled()
        assert future.cancel()
        await settled()
        return agent, future

    agent, future = asyncio.run(run())
    assert agent.withdrawn
    assert agent.lost == []
    with pytest.raises(CancelledError):
        future.result(0)


@pytest.mark.parametrize("error", [None, PeerMissing("nobody came")], ids=["group", "error"])
def test_a_join_has_the_outcome_of_its_registration(
    group: NodeGroup, error: PeerMissing | None
) -> None:
    outcome = error or admission_to(group)

    async def run() -> tuple[Joining, Future[JoinResult]]:
        agent, future = await join(outcome)
        await complete(agent)
        return agent, future

    agent, future = asyncio.run(run())
    assert agent.lost == []
    assert (future.exception(0) or future.result(0)) == outcome
    assert not future.cancel(), "whoever cancels now learns that it is too late"


@pytest.mark.parametrize("fails_at", ["its group", "a notice"])
def test_the_seat_of_a_rank_that_cannot_be_seated_here_is_given_up(
    group: NodeGroup, fails_at: str
) -> None:
    """The orchestrator counts it as present, and no one else knows that it is not."""

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    def make(_: Entry) -> NodeGroup:
        if fails_at == "its group":
            fail()
        return group

    registry, given_up = GroupRegistry(), []
    notices = EarlyNotices(registry)
    if fails_at == "a notice":
        notices.apply("test", group.opening, fail)
    seats: Any = create_autospec(RankSeats, instance=True)
    seats.join.return_value = Entry(group.current.plan)
    seats.give_up_seat.side_effect = lambda *seat, **_: given_up.append(seat)
    terms = create_autospec(GroupTerms, instance=True)
    joins = Joins(seats, registry, make, notices.opened, terms, nullcontext)
    with pytest.raises(OSError, match="too many open files"):
        asyncio.run(joins.join(REQUEST))
    assert given_up == [("test", 3, "s", "lost")]


@pytest.mark.parametrize(
    "wrong",
    [{"init_timeout": float("nan")}, {"init_timeout": float("inf")}, {"rank": []}, {"group": 3}],
)
def test_what_is_no_request_for_a_seat_is_refused(wrong: dict[str, Any]) -> None:
    check_request(REQUEST)
    (field,) = wrong
    with pytest.raises(InvalidArgument, match=f"not a join: {field}"):
        check_request({**REQUEST, **wrong})
