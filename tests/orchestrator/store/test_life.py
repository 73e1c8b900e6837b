"""The life of the store: one generation for all replicas, which grows when it is another one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.membership.group_state import StoreLife
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.life import StoreLives
from allfold_orchestrator.store.redis_client import connect
from tests.orchestrator.conftest import Backend, MakeStore

pytestmark = pytest.mark.anyio


async def test_all_replicas_find_the_same_first_generation(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(4)]
    found = await asyncio.gather(*(store.lives.read() for store in stores))
    assert {each.generation for each in found} == {1}
    assert len({each.run_id for each in found}) == 1
    assert await stores[0].lives.read() == found[0]


async def test_the_present_life_is_read_once(make_store: MakeStore, backend: Backend) -> None:
    store, client = make_store(), backend.client()
    known = await store.lives.present()
    await client.delete(keys.STORE)
    assert await store.lives.present() is known
    await client.aclose()


async def test_a_store_of_another_life_is_one_generation_later(
    make_store: MakeStore, backend: Backend
) -> None:
    client = backend.client()
    await client.set(keys.STORE, json.dumps({"schema": 1, "generation": 4, "run_id": "another"}))
    found = await asyncio.gather(*(make_store().lives.read() for _ in range(3)))
    assert {each.generation for each in found} == {5}
    await client.aclose()


async def test_many_who_find_one_loss_begin_one_generation(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(3)]
    first = await stores[0].lives.read()
    grown = await asyncio.gather(*(store.lives.outgrow(first.generation) for store in stores))
    assert {each.generation for each in grown} == {2}
    assert (await stores[0].lives.outgrow(7)).generation == 8
    assert (await stores[1].lives.read()).generation == 8
    assert stores[0].lives.known == StoreLife(8, first.run_id)


async def test_an_answer_from_before_a_new_generation_does_not_begin_another_one(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = make_store().lives
    await lives.read()
    read = lives._client.get

    async def overtaken(name: str) -> Any:
        monkeypatch.undo()
        answer = await read(name)
        await lives.outgrow(1)
        return answer

    monkeypatch.setattr(lives._client, "get", overtaken)
    assert (await lives.read()).generation == 2
    assert (await lives.read()).generation == 2


async def test_a_store_that_forgot_its_generation_is_a_later_one(
    make_store: MakeStore, backend: Backend
) -> None:
    client, store = backend.client(), make_store()
    await store.lives.outgrow(6)
    await client.delete(keys.STORE)
    assert (await store.lives.read()).generation == 8
    await client.aclose()


@pytest.mark.redis
async def test_a_redis_that_was_restarted_without_its_memory_is_a_later_one(
    own_redis: RedisServer,
) -> None:
    client = connect(own_redis.url)
    lives = StoreLives(client)
    before = await lives.read()
    own_redis.stop()
    own_redis.start()
    after = await lives.read()
    assert after.run_id != before.run_id
    assert after.generation == before.generation + 1
    await client.aclose()
