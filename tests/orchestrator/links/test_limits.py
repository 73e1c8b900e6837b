"""Caps on what agents send: every agent hears of them, whichever replica was told."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.orchestrator.conftest import MakeStore
from tests.orchestrator.fake_agent import FakeAgent, Replica, agents, replica
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture(autouse=True)
def admin_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")


async def put(at: Replica, **body: Any) -> None:
    (await at.http.put("/v1/limits", json=body, headers=ADMIN)).raise_for_status()


def told(agent: FakeAgent) -> list[list[str]]:
    """What an agent was told, each time: the scopes of the caps."""
    lists = [each["limits"] for each in agent.received("beat") if each["limits"] is not None]
    return [[each["node"] or each["group"] or "each" for each in some] for some in lists]


async def test_agents_of_all_replicas_hear_of_the_caps_that_are_theirs_and_only_once(
    make_store: MakeStore,
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(replica(make_store()))
        two = await stack.enter_async_context(replica(make_store()))
        a, b = await agents(stack, one, "ab")
        await until(lambda: told(a) == told(b) == [[]], "they know that there are none")
        await put(two, rate=10**6)
        await put(two, node="b", rate="25MB")
        await until(lambda: told(b)[-1] == ["each", "b"], "the one that is meant was told")
        await until(lambda: told(a)[-1] == ["each"], "the other was told")
        await put(one, rate=None)
        await until(lambda: (told(a)[-1], told(b)[-1]) == ([], ["b"]), "it holds no more")
        beats = a.beats
        await until(lambda: a.beats > beats + 5, "some more beats")
        assert all(one != other for one, other in zip(told(b), told(b)[1:], strict=False))


async def test_an_agent_that_links_later_is_told_with_its_first_beat(
    make_store: MakeStore,
) -> None:
    async with replica(make_store()) as one, AsyncExitStack() as stack:
        await put(one, group="g", rate=10**6)
        (a,) = await agents(stack, one, "a")
        await until(lambda: told(a), "it was told")
        assert told(a)[-1] == ["g"]
