"""Control links where the record of one group is damaged, or of a newer version."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from allfold_orchestrator.store import keys
from tests.orchestrator.conftest import Backend, MakeStore
from tests.orchestrator.fake_agent import FakeAgent, agents, replica
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def damage(backend: Backend, group: str) -> None:
    client = backend.client()
    await client.hset(keys.group(group), mapping={"version": "x", "meta": "{"})
    await client.publish(keys.CHANGES, group)
    await client.aclose()


async def also_in(group: str, *linked: FakeAgent) -> None:
    for rank, agent in enumerate(linked):
        await agent.join(rank, len(linked), group=group)
    for agent in linked:
        await agent.holds(*(each.name for each in linked), group=group)


async def test_a_record_that_cannot_be_read_stops_neither_terms_nor_decisions_on_others(
    make_store: MakeStore, backend: Backend
) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(make_store()))
        a, b, c = await agents(stack, served, "abc")
        await also_in("broken", a, b, c)
        await damage(backend, "broken")
        c.is_stopped = True
        await a.suspect(c)
        for agent in (a, b):
            await agent.holds("a", "b")
        await also_in("later", a, b)


async def test_an_agent_that_holds_a_group_whose_record_cannot_be_read_links_all_the_same(
    make_store: MakeStore, backend: Backend
) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(make_store()))
        a, b = await agents(stack, served, "ab")
        await also_in("broken", a, b)
        await damage(backend, "broken")
        a.messages.clear()
        await a.link()
        assert (await a.hears("registered"))["out"] == []
        await a.hears("term", group="train")


async def test_a_silent_node_is_looked_for_in_the_groups_that_can_be_read(
    make_store: MakeStore, backend: Backend
) -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(replica(make_store())) for _ in range(2)]
        a, b = await agents(stack, served[0], "ab")
        await also_in("broken", a, b)
        await damage(backend, "broken")
        await served[1].links.doubt(("b", "1"))
        await until(lambda: "train" in served[1].links._terms.records, "it knows who hears it")
