"""Control links of several replicas, and of a replica or a store that fails."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_control.records import read_record
from allfold_core.errors import ServiceError
from allfold_orchestrator import background
from allfold_orchestrator.links import control_links
from allfold_orchestrator.links.control_links import ControlLinks
from allfold_orchestrator.membership.group_state import GroupState, Leave, Reason, StoreLife
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.redis_client import connect as connect_redis
from allfold_orchestrator.store.store import Store
from tests.orchestrator.builders import lost
from tests.orchestrator.conftest import Backend, MakeStore, Real
from tests.orchestrator.fake_agent import SECONDS, agents, replica
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


# A replica that fails


async def test_what_a_replica_decided_and_could_not_announce_another_one_announces(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        dying, other = make_store(), make_store()
        served = [await stack.enter_async_context(replica(each)) for each in (dying, other)]
        _, b = await agents(stack, served, "ab")
        assert await dying.nodes.evict("a", "1")  # and here its power fails
        await b.holds("b")


async def test_a_node_is_cleared_by_its_answer_on_a_link_to_another_replica(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b = await agents(stack, served, "ab")
        b.control_is_silent = b.beats_rarely = True
        await a.suspect(b)
        await b.hears("probe")
        await a.hears("cleared", node="b")
        await until(lambda: served[0].links._runner.is_idle, "the suspect is closed")
        assert (await served[0].group())["phase"] == "ready"


async def test_an_suspicion_counts_at_a_replica_to_which_its_reporter_has_linked_just_now(
    make_store: MakeStore,
) -> None:
    """It was made at a replica that is gone, perhaps together with the suspect."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(replica(make_store()))
        async with replica(make_store()) as first:
            a, b, _ = await agents(stack, first, "abc")
        b.is_stopped = True
        a.at = other
        await a.link()
        await a.suspect(b)
        await a.holds("a", "c")


async def test_a_dead_link_that_two_replicas_decide_on_costs_one_node(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b, c, d = await agents(stack, served, "abcd")
        for agent in (a, b, c, d):
            agent.heard = dict.fromkeys("abcd", 0.0)
        a.heard["b"] = b.heard["a"] = 60.0
        await a.suspect(b)
        await b.suspect(a)
        for agent in (c, d):
            assert (await agent.holds("a", "c", "d"))["term"]["number"] == 2
        await until(lambda: all(each.links._runner.is_idle for each in served), "all is decided")
        assert [place["node"] for place in (await served[0].group())["lost"]] == ["b"]


async def test_a_replica_in_its_turn_sees_what_another_one_decided_before(
    make_store: MakeStore,
) -> None:
    """One end of a dead link is gone already, and the notification of that was lost."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b, _, d = await agents(stack, served[::-1], "abcd")
        b.heard, d.heard = {"a": 60.0, "d": 0.0}, {"a": 0.0, "b": 0.0}
        served[0].store.on_change.clear()
        await b.suspect(a)
        await b.hears("cleared", node="a")
        assert await served[1].store.nodes.evict("a", "1")
        await served[1].links._orchestrator.clear_up([("a", "1")])
        await until(lambda: served[0].links._runner.is_idle, "all is decided")
        assert [place["node"] for place in (await served[0].group())["lost"]] == ["a"]


async def test_of_two_replicas_one_decides_at_a_time(make_store: MakeStore) -> None:
    one, other = make_store(), make_store()
    async with one.decisions.turn() as first, other.decisions.turn() as second:
        assert first is not None
        assert second is None
    async with other.decisions.turn() as again:
        assert again


async def test_a_turn_that_was_over_before_its_end_does_not_end_that_of_another(
    make_store: MakeStore, backend: Backend
) -> None:
    one, client = make_store(), backend.client()
    async with one.decisions.turn():
        await client.set(keys.DETECTOR, "another")
    assert await client.get(keys.DETECTOR) == "another"
    await client.aclose()


async def test_a_replica_that_was_frozen_announces_nothing_in_a_generation_that_is_over(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        frozen, other = make_store(), make_store()
        served = [await stack.enter_async_context(replica(each)) for each in (frozen, other)]
        a, _, _ = await agents(stack, served, "abc")
        # So that it looks only to announce.
        monkeypatch.setattr(control_links, "LIFE_SECONDS", 3600)
        thawed, reading = asyncio.Event(), asyncio.Event()
        read = frozen.lives.read

        async def read_later() -> StoreLife:
            reading.set()
            await thawed.wait()
            return await read()

        monkeypatch.setattr(frozen.lives, "read", read_later)
        old = a.generation
        await other.lives.outgrow(old)
        assert await other.nodes.evict("c", "1")
        await served[1].links._orchestrator.clear_up([("c", "1")])
        await within(SECONDS, reading.wait())
        before = len(a.messages)
        thawed.set()
        await a.holds("a", "b")
        assert a.generation == old + 1
        later = a.messages[before:]
        assert [m["generation"] for m in later if m["type"] == "term"] == [old + 1]
        assert [m["generation"] for m in later if m["type"] == "recall"] == [old + 1]


async def test_what_was_read_before_the_store_lost_it_is_not_announced_as_of_the_store_now(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        store = make_store()
        one = await stack.enter_async_context(replica(store))
        a, _, _ = await agents(stack, one, "abc")
        generation, read = a.generation, store.groups.read_if_possible

        async def lost_at_once(group: str) -> GroupState | None:
            state = await read(group)
            assert state is not None
            monkeypatch.setattr(store.groups, "read_if_possible", read)
            await store.lives.outgrow(generation)
            a.messages.clear()
            await a.link()
            await a.hears("registered", generation=generation + 1)
            return step(state, lost("c"))[0]

        monkeypatch.setattr(store.groups, "read_if_possible", lost_at_once)
        one.links._hear("train")
        await a.hears("term", generation=generation + 1)
        told = [each["record"]["term"]["voters"] for each in a.received("term")]
        assert told == [["a", "b", "c"]]


# A store that fails


async def test_while_the_store_does_not_answer_it_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = 0

    async def read(*_: object) -> GroupState:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        raise ServiceError("the store does not answer")

    store: Any = SimpleNamespace(
        on_change=[],
        on_probe=[],
        on_drain=[],
        on_limits=[],
        limits=SimpleNamespace(all=AsyncMock(return_value=())),
        lives=SimpleNamespace(read=AsyncMock(return_value=StoreLife(1, "x"))),
        groups=SimpleNamespace(read_if_possible=read),
    )
    monkeypatch.setattr(control_links, "TICK_SECONDS", 3600)
    links = ControlLinks(store, AsyncMock())
    running = asyncio.create_task(links.run())
    links._hear("train")

    async def was_asked(times: int) -> None:
        await until(lambda: asked == times, "the store was asked")
        for _ in range(100):
            await asyncio.sleep(0)
        assert asked == times, "it waits for the next tick, or for news"

    await was_asked(1)
    links._hear("train")
    await was_asked(2)
    await background.end(running)


# The loss of the record


@pytest.mark.redis
async def test_a_record_that_redis_lost_is_rebuilt_from_what_agents_register(
    own_redis: RedisServer,
) -> None:
    store = Store(connect_redis(own_redis.url), 60)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(store))
        a, b, c = await agents(stack, served, "abc")
        before = a.held["train"]
        own_redis.stop()
        own_redis.start()
        for agent in (a, b, c):
            await agent.register()
        for agent in (a, b, c):
            if agent.generation == 1:
                await agent.link()
        for agent in (a, b, c):
            await agent.hears("term", generation=2)
        await until(
            lambda: served.links._terms.records["train"].recall is None, "all have registered"
        )
        (view,) = (await served.http.get("/v1/groups")).json()["groups"]
        ranks = [{"rank": rank, "node": node} for rank, node in enumerate("abc")]
        assert (view["phase"], view["present"], view["missing"]) == ("recalled", ranks, [])
        assert (view["term"]["nodes"], view["term"]["trusted"]) == (["a", "b", "c"], True)
        record = served.links._terms.records["train"]
        assert record.generation == 2
        assert record == replace(read_record(before), generation=2)
        await c.die()
        for agent in (a, b):
            assert (await agent.holds("a", "b"))["term"]["generation"] == 2


async def test_agents_that_registered_before_a_record_was_recalled_are_asked_once_more(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they count as nodes that never came back."""
    monkeypatch.setattr(control_links, "LIFE_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b = await agents(stack, served, "ab")
        orchestrator = served[0].links._orchestrator
        await orchestrator.leave("train", Leave(0, "s0", Reason.FINISHED))
        await a.join(0, 2, session="next0")
        await b.join(1, 2, session="next1")
        await served[0].store.lives.outgrow(1)
        for agent in (a, b):
            await agent.hears("term", generation=2)
        await orchestrator.leave("train", Leave(1, "s1", Reason.FINISHED))
        await until(lambda: {each.held["train"]["epoch"] for each in (a, b)} == {2}, "it is open")
        await a.link()
        terms = [each.links._terms.records for each in served]
        await until(lambda: all(each["train"].generation == 2 for each in terms), "it is recalled")
        await until(lambda: not any(each["train"].recall for each in terms), "all have registered")


async def test_while_a_record_is_recalled_nobody_is_evicted_for_silence(real: Real) -> None:
    store = Store(connect_redis(real.url), 60)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(store))
        a, b, c = await agents(stack, served, "abc")
        c.is_stopped = True
        await store.lives.outgrow(1)
        for agent in (a, b):
            await agent.hears("recall", generation=2)
            await agent.hears("term", generation=2)
        await a.suspect(c)
        suspects = served.links._runner.detector._suspects
        await until(lambda: ("c", "1") in suspects, "it is suspected")
        until_then = suspects["c", "1"].until
        await until(
            lambda: monotonic() > until_then + 0.2, "the failure detector has found it silent"
        )
        assert (await served.group())["phase"] == "ready"
        assert not a.received("cleared"), "it stays suspected"
        c.is_stopped = False
        await c.say_what_it_holds()
        await c.hears("registered", generation=2)
        await a.hears("cleared", node="c")
        assert (await served.group())["phase"] == "ready"
