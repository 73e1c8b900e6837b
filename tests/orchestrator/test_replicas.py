"""Several orchestrators on one real Redis: what one of them does, the others notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator import background, bells, keys, redis_client, service
from allfold_orchestrator.redis_client import connect
from allfold_orchestrator.store import Store
from tests.orchestrator.api_client import ApiClient, serving
from tests.orchestrator.conftest import Real
from tests.support.redis_server import RedisServer
from tests.support.waiting import until, within

LONG_LEASE = 60.0

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


@pytest.fixture
async def replicas(real: Real) -> AsyncIterator[list[ApiClient]]:
    async with AsyncExitStack() as stack:
        stores = [Store(real.client(), LONG_LEASE) for _ in range(2)]
        yield [await stack.enter_async_context(serving(store=store)) for store in stores]


async def listening(real: Real, replicas: int) -> None:
    """All replicas hear of changes."""
    client = connect(real.url)

    async def subscribers() -> int:
        ((_, count),) = await client.pubsub_numsub("allfold:changes")  # type: ignore[attr-defined]
        return int(count)

    async with asyncio.timeout(10):
        while await subscribers() < replicas:
            await asyncio.sleep(0.01)
    await client.aclose()


async def test_a_long_poll_on_one_replica_is_woken_by_a_join_on_another(
    replicas: list[ApiClient], real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RECHECK_SECONDS", 30)
    await listening(real, 2)
    one, other = replicas
    await one.register("a")
    await one.join(0)
    waiting = asyncio.create_task(one.plan("s0", wait=30))
    await until(lambda: one.store.bells._waiting, "the long-poll waits")
    assert (await other.join(1)).json() == {"epoch": 1, "ready": True}
    assert (await within(5, waiting)).json() == (await other.plan("s1")).json()


async def test_a_lost_announcement_costs_a_second_and_no_hang(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("allfold_orchestrator.store.relay", deaf)
    async with (
        serving(store=Store(real.client(), LONG_LEASE)) as one,
        serving(store=Store(real.client(), LONG_LEASE)) as other,
    ):
        await one.register("a")
        await one.join(0)
        waiting = asyncio.create_task(one.plan("s0", wait=30))
        await until(lambda: one.store.bells._waiting, "the long-poll waits")
        await other.join(1)
        assert (await within(5, waiting)).json()["ready"] is True


async def test_after_an_outage_of_redis_announcements_are_heard_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bells, "RECONNECT_SECONDS", 0.01)
    heard: list[str] = []
    gaps: list[float] = []
    client = connect(own_redis.url)
    relaying = asyncio.create_task(
        bells.relay(client, heard.append, lambda: gaps.append(monotonic()))
    )
    await until(lambda: len(gaps) == 1, "it listens")
    own_redis.stop()
    await asyncio.to_thread(own_redis.start)
    await until(lambda: len(gaps) > 1, "it listens again")
    await client.publish(keys.CHANGES, "train")
    await until(lambda: heard == ["train"], "it hears")
    await background.end(relaying)
    await client.aclose()


async def test_a_node_may_talk_to_any_replica(replicas: list[ApiClient]) -> None:
    one, other = replicas
    await one.register("a")
    beat = await other.http.post("/v1/nodes/a/heartbeat", json={"incarnation": "1"})
    assert beat.status_code == 200
    await other.join(0)
    await one.join(1)
    assert (await other.leave(1)).status_code == 200
    assert await one.group() == await other.group()


async def test_a_large_group_forms_quickly_over_two_replicas(replicas: list[ApiClient]) -> None:
    world_size = 160
    for node in range(20):
        await replicas[node % 2].register(f"n{node}")
    joins = await asyncio.gather(
        *(
            replicas[rank % 2].join(rank, f"n{rank % 20}", world_size=world_size)
            for rank in range(world_size)
        )
    )
    assert [join.text for join in joins if join.status_code != 200] == []
    plans = await asyncio.gather(
        *(replicas[rank % 2].plan(f"s{rank}", wait=20) for rank in range(world_size))
    )
    assert {plan.text for plan in plans} == {plans[0].text}
    assert plans[0].json()["plan"]["world_size"] == world_size


async def test_a_store_that_stops_answering_is_an_error_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that accepts and says nothing, as behind a firewall that drops everything."""
    monkeypatch.setattr(redis_client, "ANSWER_SECONDS", 0.1)
    accepted: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    store = Store(connect(f"redis://127.0.0.1:{port}/0"), LONG_LEASE)
    with pytest.raises(ServiceError, match="running jobs are not affected"):
        await within(10, store.ping())
    await store.close()
    silent.close()
    for writer in accepted:
        writer.close()
        await writer.wait_closed()
