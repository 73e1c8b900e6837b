"""Ranks join groups and leave them over the control link of their agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from fakeredis import FakeServer

from allfold_core.errors import MultipleRegister, PeerLost, ServiceError
from allfold_orchestrator.store.redis_client import connect_embedded
from allfold_orchestrator.store.store import Store
from tests.orchestrator.conftest import MakeStore
from tests.orchestrator.fake_agent import SECONDS, FakeAgent, Json, Replica, agents, replica
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def one(make_store: MakeStore) -> AsyncIterator[Replica]:
    async with replica(make_store()) as served:
        yield served


@pytest.fixture
async def linked(one: Replica) -> AsyncIterator[tuple[FakeAgent, FakeAgent]]:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(FakeAgent(name, one)) for name in "ab"]
        for agent in made:
            await agent.register()
            await agent.link()
            await agent.hears("registered")
        yield made[0], made[1]


async def join(agent: FakeAgent, rank: int, of: int, **changes: Any) -> None:
    """Ask for a seat; the number of the request is the rank's."""
    body = {
        "group": "train",
        "rank": rank,
        "node": agent.name,
        "incarnation": agent.incarnation,
        "session": f"s{rank}",
        "world_size": of,
        "timeout": 30.0,
        "wait": SECONDS,
    }
    await agent.send("join", number=rank, body=body | changes)


async def leave(agent: FakeAgent, rank: int, reason: str = "withdrawn") -> None:
    body = {"group": "train", "rank": rank, "session": f"s{rank}", "reason": reason}
    await agent.send("leave", number=100 + rank, body=body)


async def answer(agent: FakeAgent, number: int) -> Json:
    """Return the answer to the request of this number."""

    def found() -> list[Json]:
        return [each for each in agent.received("answer") if number in each["numbers"]]

    await until(found, f"an answer to {number}")
    return found()[0]


async def test_ranks_get_their_plan_and_those_of_one_agent_get_it_together(
    one: Replica, linked: tuple[FakeAgent, FakeAgent]
) -> None:
    a, b = linked
    for rank in range(2):
        await join(a, rank, of=3)
    await until(lambda: len(one.store.notifications._waiting.get("train", ())) == 2, "both wait")
    await join(b, 2, of=3)
    plan = await answer(b, 2)
    assert (plan["status"], plan["body"]["ready"]) == (200, True)
    assert plan["body"]["plan"]["sessions"] == ["s0", "s1", "s2"]
    together = await answer(a, 0)
    assert sorted(together["numbers"]) == [0, 1]
    assert together["body"] == plan["body"] == await a.plan("s0"), "as REST answers it"


async def test_a_rank_whose_time_is_over_hears_who_is_missing(
    linked: tuple[FakeAgent, FakeAgent],
) -> None:
    await join(linked[0], 0, of=2, wait=0.05)
    body = (await answer(linked[0], 0))["body"]
    assert (body["ready"], body["present"], body["missing"]) == (False, [0], [1])


async def test_a_join_that_is_repeated_on_another_link_gets_the_plan(
    linked: tuple[FakeAgent, FakeAgent],
) -> None:
    a, b = linked
    await join(a, 0, of=2)
    await a.link()
    await join(b, 1, of=2)
    await join(a, 0, of=2)
    assert (await answer(a, 0))["body"] == (await answer(b, 1))["body"]


async def test_nobody_waits_for_a_plan_whose_link_has_ended(
    one: Replica, linked: tuple[FakeAgent, FakeAgent]
) -> None:
    await join(linked[0], 0, of=2)
    await until(lambda: one.store.notifications._waiting, "it waits")
    await linked[0].die()
    await until(lambda: not one.store.notifications._waiting, "nobody waits")


async def test_a_rank_that_leaves_while_it_is_being_seated_has_no_seat_afterwards(
    one: Replica, linked: tuple[FakeAgent, FakeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = one.store.lives.present
    leaves: list[bool] = []

    async def present() -> Any:  # the join comes this far, then the rank leaves
        if not leaves:
            leaves.append(True)
            await leave(linked[0], 0)
            await linked[0].send("beat", number=10_000)
            await linked[0].hears("beat", number=10_000)
        return await read()

    monkeypatch.setattr(one.store.lives, "present", present)
    await join(linked[0], 0, of=2)
    assert (await answer(linked[0], 100))["status"] == 200
    assert (await one.group())["error"]["message"] == "there is no group train"
    gone = await answer(linked[0], 0)
    assert (gone["status"], gone["body"]["error"]["code"]) == (410, PeerLost.code)


async def test_a_rank_leaves_a_group(one: Replica, linked: tuple[FakeAgent, FakeAgent]) -> None:
    a, b = linked
    await join(a, 0, of=2)
    await join(b, 1, of=2)
    await answer(b, 1)
    await leave(b, 1, "finished")
    assert (await answer(b, 101))["body"] == {}
    assert [left["rank"] for left in (await one.group())["left"]] == [1]


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"group": "not a name"}, 400, "group"),
        ({"world_size": 0}, 400, "world_size"),
        ({"session": None}, 400, "session"),
        ({"more": 1}, 400, "there is no such field"),
        ({"incarnation": "9"}, 404, "not registered in this incarnation"),
        ({"min_world": 3}, 400, "min_world"),
        ({"strategies": {"all_reduce": "bubble"}}, 400, "bubble"),
    ],
)
async def test_what_cannot_be_is_refused_and_the_link_goes_on(
    linked: tuple[FakeAgent, FakeAgent], changes: Json, status: int, text: str
) -> None:
    a, b = linked
    await join(a, 0, of=2, **changes)
    refused = await answer(a, 0)
    assert refused["status"] == status
    assert text in refused["body"]["error"]["message"]
    await join(a, 1, of=2)
    await join(b, 0, of=2)
    assert (await answer(a, 1))["body"]["ready"]


async def test_a_rank_that_is_taken_is_refused(linked: tuple[FakeAgent, FakeAgent]) -> None:
    a, b = linked
    await join(a, 0, of=2)
    await leave(a, 7)
    await answer(a, 107)  # by then the other has its seat
    await join(b, 0, of=2, session="other")
    refused = await answer(b, 0)
    assert (refused["status"], refused["body"]["error"]["code"]) == (409, MultipleRegister.code)


async def test_a_bug_is_answered_and_logged(
    linked: tuple[FakeAgent, FakeAgent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr("allfold_orchestrator.service.Orchestrator.join", broken)
    await join(linked[0], 0, of=2)
    failed = await answer(linked[0], 0)
    assert failed["status"] == 500
    assert "failed on a request to join" in failed["body"]["error"]["message"]
    assert "nobody foresaw this" in caplog.text


async def test_a_second_job_is_refused_when_nodes_tell_of_a_group_that_this_service_has_lost(
    make_store: MakeStore,
) -> None:
    """Its ranks may come first: those wait, and are told to ask again."""
    async with AsyncExitStack() as stack:
        before = await stack.enter_async_context(replica(make_store()))
        members = await agents(stack, before, "ab")
        anew = await stack.enter_async_context(replica(Store(connect_embedded(FakeServer()), 60.0)))
        (other,) = await agents(stack, anew, "c", group="else")
        await join(other, 0, of=2, session="new")
        await until(lambda: anew.store.notifications._waiting, "it waits")
        for agent in members:
            agent.at = anew
            await agent.register()
            await agent.link()
        told = await answer(other, 0)
        assert told["status"] == ServiceError.status
        await join(other, 1, of=2, session="new")
        refused = await answer(other, 1)
        assert refused["status"] == MultipleRegister.status
        assert "the group runs, with 2 ranks on nodes a, b" in str(refused["body"])
