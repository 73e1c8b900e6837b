"""The orchestrator or its Redis is away for longer than a lease, and every agent is alive."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator import background
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from tests.orchestrator.conftest import ManualClock, Real
from tests.orchestrator.fake_agent import FakeAgent, Replica, agents, replica
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

LEASE_SECONDS = 0.5
PATIENT_SECONDS = 60.0
SHORT = {"lease_seconds": LEASE_SECONDS, "heartbeat_seconds": 0.1}
# A sweeper takes a longer one, in which it could not sweep, for an outage.
STEP_SECONDS = 0.4 * LEASE_SECONDS


@asynccontextmanager
async def staying_linked(*linked: FakeAgent) -> AsyncIterator[None]:
    """These agents link anew whenever their link ends.

    Leave it before their orchestrator ends: a request on its way would outlive the client.
    """
    tasks = [asyncio.create_task(agent.stay_linked()) for agent in linked]
    try:
        yield
    finally:
        for task in tasks:
            await background.end(task)


def outage(clock: ManualClock) -> None:
    """Longer than a lease: that the store notes nothing for so long is what is tested."""
    clock.time += 2 * LEASE_SECONDS


async def has_looked_at_all_leases(
    at: Replica, clock: ManualClock, before: float, *linked: FakeAgent
) -> None:
    """The sweeper has ended every lease that it may end after the grace that follows an outage."""
    grace = at.sweeper._grace
    await until(lambda: grace.until > before, "a grace after the outage", PATIENT_SECONDS)
    while clock.time < grace.until + LEASE_SECONDS:
        clock.time += STEP_SECONDS
        for agent in linked:
            await agent.hears("beat", number=agent.beats + 1)
        await until(lambda: grace.last_sweep == clock.time, "another sweep", PATIENT_SECONDS)


async def all_goes_on(at: Replica, *linked: FakeAgent) -> None:
    """The group has all its nodes, and its name is not free until the last of them leaves."""
    names = [agent.name for agent in linked]
    for agent in linked:
        await agent.holds(*names)
    states = {node["node"]: node["state"] for node in await at.nodes()}
    assert states == dict.fromkeys(names, "alive")
    async with FakeAgent("stranger", at) as stranger:
        await stranger.register()
        await leaves(linked[0], at)
        for agent in linked[1:]:
            await agent.holds(*names[1:])
        await stranger.join(0, 1, session="another")
        plan = await stranger.plan("another")
        opening = plan["epoch"]
        assert not plan["ready"], "the name is taken"
        assert opening > 1, "the number is new"
        for agent in linked[1:]:
            await leaves(agent, at)
        assert (await stranger.plan("another"))["plan"]["epoch"] == opening


async def leaves(agent: FakeAgent, at: Replica) -> None:
    query = {"incarnation": agent.incarnation}
    (await at.http.delete(f"/v1/nodes/{agent.name}", params=query)).raise_for_status()


@pytest.mark.parametrize("is_durable", [True, False], ids=["keeps its writes", "forgets all"])
async def test_a_redis_that_was_away_for_long_costs_no_group(
    tmp_path: Path, clock: ManualClock, is_durable: bool
) -> None:
    redis = RedisServer(tmp_path, is_durable=is_durable)
    redis.start()
    try:
        async with AsyncExitStack() as stack:
            store = Store(connect(redis.url), LEASE_SECONDS, clock)
            served = await stack.enter_async_context(replica(store, **SHORT))
            linked = await agents(stack, served, "abc")
            await until(lambda: served.sweeper.problem is None, "leases are watched")
            await stack.enter_async_context(staying_linked(*linked))
            before = served.sweeper._grace.until
            redis.stop()
            outage(clock)
            redis.start()
            for agent in linked:
                await agent.hears("term", generation=2)
            await has_looked_at_all_leases(served, clock, before, *linked)
            await all_goes_on(served, *linked)
    finally:
        redis.stop()


async def test_an_orchestrator_that_was_away_for_long_costs_no_group(
    real: Real, clock: ManualClock
) -> None:
    async with AsyncExitStack() as stack:
        async with replica(Store(real.client(), LEASE_SECONDS, clock), **SHORT) as first:
            linked = await agents(stack, first, "abc")
        outage(clock)
        store = Store(real.client(), LEASE_SECONDS, clock)
        after = await stack.enter_async_context(replica(store, **SHORT))
        await until(lambda: after.sweeper.problem is None, "it has seen that all leases are over")
        for agent in linked:
            agent.at = after
        await stack.enter_async_context(staying_linked(*linked))
        await has_looked_at_all_leases(after, clock, 0.0, *linked)
        await all_goes_on(after, *linked)


async def test_a_redis_that_is_full_costs_no_group_and_says_what_it_needs(
    tmp_path: Path, clock: ManualClock
) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    administrator: Any = Redis.from_url(redis.url)
    try:
        async with AsyncExitStack() as stack:
            store = Store(connect(redis.url), LEASE_SECONDS, clock)
            served = await stack.enter_async_context(replica(store, **SHORT))
            linked = await agents(stack, served, "abc")
            await until(lambda: served.sweeper.problem is None, "leases are watched")
            await stack.enter_async_context(staying_linked(*linked))
            before = served.sweeper._grace.until
            await administrator.config_set("maxmemory-policy", "noeviction")
            await administrator.config_set("maxmemory", "1")
            refused = await served.http.post("/v1/nodes", json=linked[0].registration)
            error = refused.json()["error"]
            assert (refused.status_code, error["details"]["retry"]) == (503, True)
            assert "cannot write to its state store" in error["message"]
            assert "maxmemory" in error["message"]
            await until(lambda: served.sweeper.problem, "people can see it")
            ready = await served.http.get("/readyz")
            assert ready.status_code == 503
            assert "the state store refuses writes" in ready.text
            outage(clock)
            await administrator.config_set("maxmemory", "0")
            await has_looked_at_all_leases(served, clock, before, *linked)
            await all_goes_on(served, *linked)
    finally:
        await administrator.aclose()
        redis.stop()


async def test_links_stay_while_redis_is_full_and_the_outage_is_logged_once(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Another replica could not write either, so there is nothing to link anew for."""
    caplog.set_level("INFO", "allfold_orchestrator")
    redis = RedisServer(tmp_path)
    redis.start()
    administrator: Any = Redis.from_url(redis.url)
    try:
        async with AsyncExitStack() as stack:
            store = Store(connect(redis.url), LEASE_SECONDS, clock)
            served = await stack.enter_async_context(replica(store, **SHORT))
            linked = await agents(stack, served, "ab")
            await until(lambda: served.sweeper.problem is None, "leases are watched")
            caplog.clear()
            before = served.sweeper._grace.until
            await administrator.config_set("maxmemory-policy", "noeviction")
            await administrator.config_set("maxmemory", "1")
            await until(lambda: served.sweeper.problem, "people can see it")
            for agent in linked:
                await agent.hears("beat", number=len(agent.received("beat")) + 3)
            linked[0].heard = {"b": 0.0}
            await linked[0].suspect(linked[1])
            await linked[0].hears("cleared", node="b")
            outage(clock)
            await administrator.config_set("maxmemory", "0")
            await has_looked_at_all_leases(served, clock, before, *linked)
            await all_goes_on(served, *linked)  # on the links that they had
            told = [each for each in caplog.messages if "leases" in each]
            assert len(told) == 2, caplog.messages
            assert "refuses writes" in told[0]
            assert re.fullmatch(r"leases are watched again, after \d+\.\d s", told[1])
            assert not [each for each in caplog.records if each.exc_info]
    finally:
        await administrator.aclose()
        redis.stop()
