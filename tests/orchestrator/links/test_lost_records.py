"""Nodes that end while Redis loses the records of their groups, and the orchestrator ends, too."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.store.redis_client import connect as connect_redis
from allfold_orchestrator.store.store import Store
from tests.orchestrator.fake_agent import FakeAgent, agents, replica

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

LEASE_SECONDS = 1.0  # as long is the grace for those who do not register


def a_store(redis: RedisServer) -> Store:
    return Store(connect_redis(redis.url), LEASE_SECONDS)


async def lose_everything(redis: RedisServer, stack: AsyncExitStack) -> list[FakeAgent]:
    """Three agents of one group; then their replica ends, and Redis forgets all."""
    async with replica(a_store(redis)) as before:
        found = await agents(stack, before, "abc")
        for agent in found:
            for task in agent._tasks:
                task.cancel()
            await agent._socket.close()
    redis.stop()
    redis.start()
    return found


async def test_one_of_three_nodes_goes_on_where_the_others_refuse_all(
    own_redis: RedisServer,
) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await lose_everything(own_redis, stack)
        await b.die()
        await c.die()
        a.at = await stack.enter_async_context(replica(a_store(own_redis)))
        await a.register()
        await a.link()
        await a.hears("registered", generation=a.generation)
        await a.suspect(b, "refused")
        await a.suspect(c, "refused")
        how = "refused connections of a, and gave no sign of life"
        await a.holds("a")
        terms = [message["record"]["term"] for message in a.received("term")]
        assert {node: how for term in terms for node, how in term["lost"]} == {"b": how, "c": how}


async def test_a_node_that_was_started_anew_does_not_clear_its_life_before(
    own_redis: RedisServer,
) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = await lose_everything(own_redis, stack)
        at = await stack.enter_async_context(replica(a_store(own_redis)))
        c.incarnation = "2"
        c.held.clear()
        for agent in (a, b, c):
            agent.at = at
            await agent.register()
            await agent.link()
        for agent in (a, b):
            await agent.hears("term", generation=a.generation)
        await a.send("suspect", node="c", incarnation="1", kind="refused")
        lost = (await a.holds("a", "b"))["term"]["lost"]
        assert [node for node, _ in lost] == ["c"]
