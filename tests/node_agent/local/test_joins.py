"""A rank may die at any moment of its registration: its seat is given back or reported lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any
from unittest.mock import create_autospec

import pytest

from allfold_agent.agent import Agent
from allfold_agent.groups.group import Group
from allfold_agent.groups.registry import Registry
from allfold_agent.local.rank_connection import Membership
from allfold_agent.local.server import PROCESS_ENDED
from allfold_agent.membership.draining import Draining
from allfold_agent.membership.early_notices import EarlyNotices
from allfold_agent.membership.seats import Seats
from allfold_core.errors import PeerMissing
from allfold_core.plan import Plan
from tests.support.fakes.local_groups import local_groups

REQUEST = {"group": "g", "rank": 3, "session": "s"}


class Joining(Agent):
    """An agent without ports, whose joins end as a test says."""

    def __init__(
        self, future: Future[Group], dies_before_the_end: bool, outcome: Group | Exception
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = set()
        self.future = future
        self.dies = dies_before_the_end
        self.outcome = outcome
        self.lost: list[Membership] = []
        self.complete = asyncio.Event()
        self.withdrawn = False

    async def _join(self, request: dict[str, Any]) -> Group:
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
        self, membership: Membership, reason: str = PROCESS_ENDED, *, withdraws: bool = False
    ) -> None:
        self.lost.append(membership)


@pytest.fixture
def group() -> Iterator[Group]:
    with local_groups([[0, 1, 2, 3]]) as local:
        yield local.groups[0]


async def join(
    outcome: Group | Exception, *, dies_before_the_end: bool = False
) -> tuple[Joining, Future[Group]]:
    future: Future[Group] = Future()
    agent = Joining(future, dies_before_the_end, outcome)
    agent._start_join(REQUEST, future)
    return agent, future


async def complete(agent: Joining) -> None:
    agent.complete.set()
    await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_rank_that_dies_as_its_join_completes_is_lost(group: Group) -> None:
    async def run() -> Joining:
        agent, _ = await join(group, dies_before_the_end=True)
        await complete(agent)
        return agent

    agent = asyncio.run(run())
    assert [(each.session, each.group) for each in agent.lost] == [("s", group)]


def test_a_rank_that_dies_while_it_joins_is_withdrawn(group: Group) -> None:
    async def run() -> tuple[Joining, Future[Group]]:
        agent, future = await join(group)
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
    group: Group, error: PeerMissing | None
) -> None:
    outcome = error or group

    async def run() -> tuple[Joining, Future[Group]]:
        agent, future = await join(outcome)
        await complete(agent)
        return agent, future

    agent, future = asyncio.run(run())
    assert agent.lost == []
    assert (future.exception(0) or future.result(0)) == outcome
    assert not future.cancel(), "whoever cancels now learns that it is too late"


class Seated(Agent):
    """An agent without ports, whose rank gets a seat in a complete group.

    Attributes:
        given_up: the seats that were given back, with the reason.
    """

    def __init__(self, group: Group, fails_at: str) -> None:
        self.group = group
        self.fails_at = fails_at
        self.given_up: list[tuple[str, int, str, str]] = []
        self.registry = Registry()
        self.notices = EarlyNotices(self.registry)
        self.draining: Any = create_autospec(Draining, instance=True)
        self.seats: Any = create_autospec(Seats, instance=True)
        self.seats.join.return_value = group.current.plan
        self.seats.give_up_seat.side_effect = lambda *seat: self.given_up.append(seat)
        if fails_at == "a notice":
            self.notices.apply("test", group.opening, self._fail)

    def _make_group(self, plan: Plan) -> Group:
        if self.fails_at == "its group":
            self._fail()
        return self.group

    @staticmethod
    def _fail(*_: object) -> None:
        raise OSError("too many open files")


@pytest.mark.parametrize("fails_at", ["its group", "a notice"])
def test_the_seat_of_a_rank_that_cannot_be_seated_here_is_given_up(
    group: Group, fails_at: str
) -> None:
    """The orchestrator counts it as present, and no one else knows that it is not."""
    agent = Seated(group, fails_at)
    with pytest.raises(OSError, match="too many open files"):
        asyncio.run(agent._join(REQUEST))
    assert agent.given_up == [("test", 3, "s", "lost")]
