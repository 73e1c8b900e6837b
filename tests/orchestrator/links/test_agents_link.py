"""The real control link of an agent at real replicas of the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from tests.node_agent.membership.linked_node import LinkedNode, linked_node
from tests.orchestrator.conftest import Backend, MakeStore
from tests.orchestrator.fake_agent import SECONDS, FakeAgent, Replica, replica
from tests.support.waiting import PAUSE_SECONDS, until, within

pytestmark = pytest.mark.anyio

BEAT_SECONDS = 0.05

JOIN = {
    "group": "train",
    "rank": 0,
    "session": "s0",
    "world_size": 2,
    "timeout": 30.0,
    "init_timeout": SECONDS,
    "strategies": {},
}


@pytest.fixture
async def one(make_store: MakeStore) -> AsyncIterator[Replica]:
    async with replica(make_store(), heartbeat_seconds=BEAT_SECONDS) as served:
        yield served


def url(at: Replica) -> str:
    return f"http://{at.address}"


async def is_linked(node: LinkedNode, times: int = 1) -> None:
    await until(lambda: len(node.listener.of("registered")) >= times, "it is linked")


async def view_of_node(at: Replica) -> dict[str, Any]:
    view: dict[str, Any] = (await at.http.get("/v1/nodes")).json()["nodes"][0]
    return view


async def beats(node: LinkedNode, at: Replica) -> None:
    """Wait until a BEAT has extended the node's lease."""
    life = ("a", node.registration.incarnation)
    before = await at.store.nodes.leases([life])
    async with asyncio.timeout(SECONDS):
        while await at.store.nodes.leases([life]) in (before, {life: None}):
            await asyncio.sleep(PAUSE_SECONDS)


async def form(stack: AsyncExitStack, node: LinkedNode, at: Replica) -> FakeAgent:
    """Form a group of a rank of this node and one of another, which is returned."""
    other = await stack.enter_async_context(FakeAgent("b", at))
    await other.register()
    await other.link()
    await is_linked(node)
    joining = asyncio.create_task(node.seats.join(JOIN, monotonic() + SECONDS))
    await other.join(1, of=2)
    entry = await within(SECONDS, joining)
    assert entry.plan.world_size == 2
    await until(lambda: node.listener.of("term"), "the first term is announced")
    return other


async def is_untouched(at: Replica) -> None:
    """Look whether the group still has both ranks, and its first term."""
    view = await at.group()
    assert (view["phase"], len(view["present"]), view["lost"]) == ("ready", 2, [])
    assert at.links._terms.records["train"].term.number == 1


async def test_beats_keep_the_lease_and_tell_of_progress(one: Replica) -> None:
    async with linked_node(url(one)) as node:
        await is_linked(node)
        await beats(node, one)
        view = await view_of_node(one)
        said = [each.model_dump() for each in node.listener.progress()]
        assert (view["state"], view["progress"]) == ("alive", said)


async def test_a_link_whose_beats_are_to_come_rarely_is_not_taken_for_silent(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four beats may be missing: so rarely that a busy machine is late for none of them.
    rarely = 0.5
    monkeypatch.setattr("allfold_orchestrator.http.link_route.SILENT_SECONDS", rarely / 5)
    async with (
        replica(make_store(), heartbeat_seconds=rarely) as one,
        linked_node(url(one)) as node,
    ):
        for _ in range(3):
            await beats(node, one)
        assert len(node.listener.of("registered")) == 1


async def test_the_link_has_the_token(make_store: MakeStore) -> None:
    async with (
        replica(make_store(), token="secret", heartbeat_seconds=BEAT_SECONDS) as one,
        linked_node(url(one), token="secret") as node,
    ):
        await is_linked(node)
        await beats(node, one)


async def test_a_store_that_was_emptied_gets_the_node_again(one: Replica, backend: Backend) -> None:
    async with linked_node(url(one)) as node:
        await is_linked(node)
        client = backend.client()
        await client.flushall()  # type: ignore[attr-defined]
        await client.aclose()
        await is_linked(node, 2)
        await beats(node, one)
        assert node.listener.of("evicted") == [], "it is the same life"


async def test_an_evicted_node_comes_back_as_a_new_life(one: Replica) -> None:
    async with linked_node(url(one)) as node:
        await is_linked(node)
        old = node.registration.incarnation
        await one.http.delete("/v1/nodes/a", params={"incarnation": old})
        await is_linked(node, 2)
        await beats(node, one)
        assert node.registration.incarnation != old
        assert (await view_of_node(one))["state"] == "alive"


async def test_a_goodbye_ends_the_life_at_once(one: Replica) -> None:
    async with linked_node(url(one)) as node:
        await is_linked(node)
        await node.end()
        assert (await view_of_node(one))["state"] == "gone"
        assert node.listener.of("evicted") == []


async def test_who_registers_without_saying_what_it_holds_loses_nothing(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(linked_node(url(one)))
        await form(stack, node, one)
        (link,) = [each for life, each in one.links._links.items() if life[0] == "a"]
        link.close()
        await is_linked(node, 2)
        await until(lambda: len(node.listener.of("term")) == 2, "it is told of the term again")
        await beats(node, one)
        await is_untouched(one)


async def test_a_recall_costs_no_node_its_groups(
    one: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_orchestrator.links.control_links.LIFE_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(linked_node(url(one)))
        await form(stack, node, one)
        generation = (await one.store.lives.read()).generation
        later = (await one.store.lives.outgrow(generation)).generation
        await until(lambda: [later, []] in node.listener.of("registered"), "it registers again")
        await beats(node, one)
        assert (await one.group())["lost"] == []
        assert (await one.group())["phase"] == "ready"


async def test_where_a_replica_ends_its_nodes_link_to_another_and_no_group_is_touched(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        survivor = await stack.enter_async_context(replica(make_store()))
        async with replica(make_store()) as first:
            node = await stack.enter_async_context(linked_node(url(first), url(survivor)))
            await form(stack, node, survivor)
        await is_linked(node, 2)
        await beats(node, survivor)
        await is_untouched(survivor)


async def test_an_suspicion_reaches_the_detector(one: Replica) -> None:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(linked_node(url(one)))
        other = await form(stack, node, one)
        other.is_stopped = True
        node.link.suspect("b", other.incarnation, "silent", 0.4, 0.0)

        def newest_term() -> tuple[str, list[str]]:
            (*_, (_, group, record)) = node.listener.of("term")  # one may be told again
            return group, list(record.term.voters)

        await until(lambda: newest_term() == ("train", ["a"]), "a term leaves it out")
