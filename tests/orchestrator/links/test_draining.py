"""Draining a node: the request finds its agent on whichever replica, and the agent tells of it."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from tests.orchestrator.conftest import MakeStore
from tests.orchestrator.fake_agent import FakeAgent, Replica, agents, replica

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(autouse=True)
def admin_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")


async def draining(at: Replica) -> dict[str, bool]:
    return {node["node"]: node["draining"] for node in await at.nodes()}


async def beats(agent: FakeAgent) -> None:
    """Return when a BEAT that the agent sends from now on was answered.

    Answers may lag behind: those to come are not all to later BEATs.
    """
    await agent.hears("beat", number=agent.beats + 1)


async def test_an_agent_that_is_linked_to_another_replica_is_told_to_drain(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(replica(make_store()))
        two = await stack.enter_async_context(replica(make_store()))
        a, b = await agents(stack, one, "ab")
        answer = await two.http.post("/v1/nodes/b/drain", headers=ADMIN)
        assert answer.raise_for_status().json()["draining"] is False
        await b.hears("drain")
        await beats(b)
        assert await draining(two) == {"a": False, "b": True}
        assert not a.received("drain")


async def test_an_agent_that_drains_is_not_told_again(make_store: MakeStore) -> None:
    async with replica(make_store()) as one, AsyncExitStack() as stack:
        (a,) = await agents(stack, one, "a")
        await one.http.post("/v1/nodes/a/drain", headers=ADMIN)
        await a.hears("drain")
        await beats(a)
        answer = await one.http.post("/v1/nodes/a/drain", headers=ADMIN)
        assert answer.raise_for_status().json()["draining"] is True
        await beats(a)
        assert len(a.received("drain")) == 1
