"""Control links: what becomes of a node that dies, falls silent, or is accused wrongly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic

import pytest
from websockets.exceptions import InvalidStatus

from allfold_orchestrator.links import hub
from allfold_orchestrator.membership.term_record import StoreLife, TermRecord
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.redis_client import connect as connect_redis
from allfold_orchestrator.store.store import Store
from benchmarks.redis_server import RedisServer
from tests.orchestrator.conftest import Backend, MakeStore, Real
from tests.orchestrator.fake_agent import SECONDS, FakeAgent, Replica, replica
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def one(make_store: MakeStore) -> AsyncIterator[Replica]:
    async with replica(make_store()) as served:
        yield served


async def agents(stack: AsyncExitStack, at: Replica | list[Replica], names: str) -> list[FakeAgent]:
    """Linked agents in one group, a rank each; where there are several replicas, in turn."""
    replicas = at if isinstance(at, list) else [at]
    made = []
    for number, name in enumerate(names):
        agent = await stack.enter_async_context(FakeAgent(name, replicas[number % len(replicas)]))
        await agent.register()
        await agent.link()
        await agent.hears("registered")
        made.append(agent)
    for rank, agent in enumerate(made):
        await agent.join(rank, len(made))
    for agent in made:
        await agent.holds(*names)
    return made


# Registering


async def test_an_agent_hears_of_the_first_term_of_its_groups(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        record = a.held["train"]
        assert record == b.held["train"]
        assert (record["epoch"], record["term"]["number"]) == (1, 1)
        assert record["seats"] == [["s0", "a"], ["s1", "b"]]
        assert record["voters"]["b"]["control_url"] == b.control_url


async def test_the_record_that_comes_with_a_plan_is_the_one_that_the_link_announces(
    one: Replica,
) -> None:
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        query: dict[str, str | int] = {"epoch": 1, "session": "s0"}
        answer = (await one.http.get("/v1/groups/train/plan", params=query)).json()
        assert answer["record"] == a.held["train"]


async def test_an_agent_that_links_anew_is_told_again(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        a.messages.clear()
        await a.link()
        await a.hears("term", group="train")


async def test_agents_at_different_replicas_hear_of_the_same_terms(make_store: MakeStore) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b, c = await agents(stack, served, "abc")
        await b.die()
        for agent in (a, c):
            assert (await agent.holds("a", "c"))["term"]["number"] == 2


async def test_a_node_that_is_not_registered_is_not_linked(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.link()
        code, reason = await agent.closed()
        assert code == 1008
        assert "POST /v1/nodes comes first" in reason


async def test_a_life_that_is_over_is_told_so(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await one.http.delete("/v1/nodes/a", params={"incarnation": "1"})
        await agent.link()
        assert (await agent.hears("registered"))["is_evicted"] is True
        await agent.closed()


async def test_beats_are_answered_and_end_where_the_life_is_over(one: Replica) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await agent.link()
        await agent.hears("beat", number=2)
        await one.http.delete("/v1/nodes/a", params={"incarnation": "1"})
        await agent.hears("registered", is_evicted=True)
        await agent.closed()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 9, "type": "beat"}',
        '{"schema": 1, "type": "moon"}',
        '{"type": "beat"}',
    ],
    ids=["no JSON", "no object", "another schema", "another type", "a field is missing"],
)
async def test_what_is_no_message_ends_the_link(one: Replica, text: str) -> None:
    async with FakeAgent("a", one) as agent:
        await agent.register()
        await agent.link()
        await agent.hears("registered")
        await agent._socket.send(text)
        code, reason = await agent.closed()
        assert code == 1008
        assert reason


async def test_a_link_needs_the_token(make_store: MakeStore) -> None:
    async with replica(make_store(), token="secret") as served, FakeAgent("a", served) as agent:
        served.http.headers["Authorization"] = "Bearer secret"
        await agent.register()
        for wrong in (None, "guess"):
            with pytest.raises(InvalidStatus, match="403"):
                await agent.link(wrong)
        await agent.link("secret")
        await agent.hears("registered")


async def test_dead_ranks_lose_their_seats_and_those_of_others_cannot_be_taken(
    one: Replica,
) -> None:
    async with AsyncExitStack() as stack:
        a, _ = await agents(stack, one, "ab")
        await a.send("seats", group="train", dead=["s1", "nobody", "s0"])
        await until(
            lambda: [*one.links._terms.records["train"].seats] == [("s1", "b")], "s0 has left"
        )
        view = await one.group()
        assert (view["phase"], view["lost"]) == (
            "reduced",
            [{"rank": 0, "node": "a", "reason": "lost"}],
        )
        assert one.links._terms.records["train"].term.number == 1


# Losing a node


async def test_a_killed_node_is_left_out_by_the_next_term_at_once(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        await until(lambda: len(one.links._court.jury._reached) == 3, "all were dialled")
        await c.die()
        for agent in (a, b):
            term = (await agent.holds("a", "b"))["term"]
            assert term["number"] == 2
            assert term["lost"] == [
                ["c", "it refuses connections of the orchestrator and of others"]
            ]
        assert (await one.group())["lost"] == [{"rank": 2, "node": "c", "reason": "node_lost"}]


async def test_a_stopped_node_is_evicted_when_nobody_hears_it(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        c.is_stopped = True
        await a.accuse(c)
        await b.hears("ping_for", node="c")
        for agent in (a, b):
            (lost,) = (await agent.holds("a", "b"))["term"]["lost"]
            assert lost == ["c", "silent to a, and gave no sign of life"]
        assert not a.received("cleared")
        c.is_stopped = False
        await c.closed()


async def test_a_node_that_answers_its_probe_is_cleared(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        a.heard = b.heard = {"c": 0.0}
        await a.accuse(c)
        assert (await a.hears("cleared", node="c", incarnation="1"))["patience"] == 0.8
        await until(lambda: one.links._court.jury.is_idle, "the case is closed")
        assert (await one.group())["phase"] == "ready"
        assert c.received("probe")
        assert not b.received("cleared")


async def test_a_node_whose_control_port_answers_is_cleared_as_well(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, _, c = await agents(stack, one, "abc")
        c.is_mute = True
        a.heard = {"c": 0.0}
        await a.accuse(c)
        await a.hears("cleared", node="c")


async def test_a_node_of_no_common_group_cannot_be_accused(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b = await agents(stack, one, "ab")
        stranger = await stack.enter_async_context(FakeAgent("x", one))
        await stranger.register()
        await stranger.link()
        await stranger.hears("registered")
        b.is_stopped = True
        await stranger.accuse(b)
        await a.accuse(a)
        await stranger.hears("beat", number=len(stranger.received("beat")) + 2)
        assert one.links._court.jury.is_idle


async def test_of_a_dead_link_one_end_goes_and_the_leader_stays(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await agents(stack, one, "abc")
        a.heard = {"b": 60.0, "c": 0.0}
        b.heard = {"a": 60.0, "c": 0.0}
        c.heard = {"a": 0.0, "b": 0.0}
        await a.accuse(b)
        await b.accuse(a)
        for agent in (a, c):
            (lost,) = (await agent.holds("a", "c"))["term"]["lost"]
            assert lost == ["b", "nothing passes between it and a, although both ends live"]
        await b.hears("registered", is_evicted=True)


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
        await a.accuse(b)
        await b.hears("probe")
        await a.hears("cleared", node="b")
        await until(lambda: served[0].links._court.is_idle, "the case is closed")
        assert (await served[0].group())["phase"] == "ready"


async def test_a_dead_link_that_two_replicas_judge_costs_one_node(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b, c, d = await agents(stack, served, "abcd")
        for agent in (a, b, c, d):
            agent.heard = dict.fromkeys("abcd", 0.0)
        a.heard["b"] = b.heard["a"] = 60.0
        await a.accuse(b)
        await b.accuse(a)
        for agent in (c, d):
            assert (await agent.holds("a", "c", "d"))["term"]["number"] == 2
        await until(lambda: all(each.links._court.is_idle for each in served), "all is decided")
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
        await b.accuse(a)
        await b.hears("cleared", node="a")
        assert await served[1].store.nodes.evict("a", "1")
        await served[1].links._orchestrator.clear_up("a", "1")
        await until(lambda: served[0].links._court.is_idle, "all is decided")
        assert [place["node"] for place in (await served[0].group())["lost"]] == ["a"]


async def test_of_two_replicas_one_judges_at_a_time(make_store: MakeStore) -> None:
    one, other = make_store(), make_store()
    async with one.judging.turn() as first, other.judging.turn() as second:
        assert (first, second) == (True, False)
    async with other.judging.turn() as again:
        assert again


async def test_a_turn_that_was_over_before_its_end_does_not_end_that_of_another(
    make_store: MakeStore, backend: Backend
) -> None:
    one, client = make_store(), backend.client()
    async with one.judging.turn():
        await client.set(keys.JURY, "another")
    assert await client.get(keys.JURY) == "another"
    await client.aclose()


async def test_a_replica_that_was_frozen_announces_nothing_in_a_generation_that_is_over(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        frozen, other = make_store(), make_store()
        served = [await stack.enter_async_context(replica(each)) for each in (frozen, other)]
        a, _, _ = await agents(stack, served, "abc")
        monkeypatch.setattr(hub, "LIFE_SECONDS", 3600)  # so that it looks only to announce
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
        await served[1].links._orchestrator.clear_up("c", "1")
        await within(SECONDS, reading.wait())
        before = len(a.messages)
        thawed.set()
        await a.holds("a", "b")
        assert a.generation == old + 1
        later = a.messages[before:]
        assert [m["generation"] for m in later if m["type"] == "term"] == [old + 1]
        assert [m["generation"] for m in later if m["type"] == "recall"] == [old + 1]


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
        record = served.links._terms.records["train"]
        assert record.generation == 2
        assert record == replace(TermRecord.from_dict(before), generation=2)
        await c.die()
        for agent in (a, b):
            assert (await agent.holds("a", "b"))["term"]["generation"] == 2


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
        await a.accuse(c)
        case = served.links._court.jury._cases
        await until(lambda: ("c", "1") in case, "it is accused")
        until_then = case["c", "1"].until
        await until(lambda: monotonic() > until_then + 0.2, "the jury has found it silent")
        assert (await served.group())["phase"] == "ready"
        assert not a.received("cleared"), "it stays accused"
        c.is_stopped = False
        await c.say_what_it_holds()
        await c.hears("registered", generation=2)
        await a.hears("cleared", node="c")
        assert (await served.group())["phase"] == "ready"
