"""Several orchestrators on one real Redis: what one of them does, the others notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import pytest

from allfold_cluster.redis_server import RedisServer
from allfold_core.errors import ServiceError
from allfold_orchestrator import background, plan_waits
from allfold_orchestrator.membership.group_state import GroupState
from allfold_orchestrator.store import keys, redis_client
from allfold_orchestrator.store import notifications as notifications
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from tests.orchestrator.api_client import ApiClient, body_of, serving
from tests.orchestrator.conftest import Real
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
    monkeypatch.setattr(plan_waits, "RECHECK_SECONDS", 30)
    await listening(real, 2)
    one, other = replicas
    await one.register("a")
    await one.join(0)
    waiting = asyncio.create_task(one.plan("s0", wait=30))
    await until(lambda: one.store.notifications._waiting, "the long-poll waits")
    assert body_of(await other.join(1)) == {"opening": 1, "epoch": 1, "ready": True}
    assert body_of(await within(5, waiting)) == body_of(await other.plan("s1"))


async def test_a_lost_announcement_costs_a_second_and_no_hang(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("allfold_orchestrator.store.store.relay", deaf)
    async with (
        serving(store=Store(real.client(), LONG_LEASE)) as one,
        serving(store=Store(real.client(), LONG_LEASE)) as other,
    ):
        await one.register("a")
        await one.join(0)
        waiting = asyncio.create_task(one.plan("s0", wait=30))
        await until(lambda: one.store.notifications._waiting, "the long-poll waits")
        await other.join(1)
        assert (await within(5, waiting)).json()["ready"] is True


async def test_after_an_outage_of_redis_announcements_are_heard_again(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "RECONNECT_SECONDS", 0.01)
    heard: list[str] = []
    gaps: list[float] = []
    client = connect(own_redis.url)
    relaying = asyncio.create_task(
        notifications.relay(client, heard.append, lambda: gaps.append(monotonic()))
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
    assert await other.store.nodes.heartbeat("a", "1", [])
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


async def test_everything_at_once_over_three_replicas_leaves_one_truth(real: Real) -> None:
    """Registrations, joins of rivals, heartbeats, leaves and losses, all as they come."""
    nodes, world_size = 24, 96
    async with AsyncExitStack() as stack:
        stores = [Store(real.client(), LONG_LEASE) for _ in range(3)]
        replicas = [await stack.enter_async_context(serving(store=store)) for store in stores]
        await asyncio.gather(*(replicas[n % 3].register(f"n{n}") for n in range(nodes)))

        async def join(rank: int, session: str, replica: ApiClient) -> int:
            node = f"n{rank % nodes}"
            answer = await replica.join(rank, node, session=session, world_size=world_size)
            return answer.status_code

        async def beat(node: int, replica: ApiClient) -> int:
            return await replica.store.nodes.heartbeat(f"n{node}", "1", [])

        rivals = [(rank, f"{way}{rank}") for rank in range(world_size) for way in "ab"]
        joins = [join(rank, s, replicas[i % 3]) for i, (rank, s) in enumerate(rivals)]
        beats = [beat(node, replicas[node % 3]) for node in range(2 * nodes)]
        statuses = await asyncio.gather(*joins, *beats)
        joined = dict(zip(rivals, statuses, strict=False))
        for rank in range(world_size):
            assert {joined[rank, f"a{rank}"], joined[rank, f"b{rank}"]} == {200, 409}
        assert statuses[len(rivals) :] == [True] * nodes + [False] * nodes

        winners = {rank: session for (rank, session), status in joined.items() if status == 200}
        plans = await asyncio.gather(
            *(replicas[rank % 3].plan(s, wait=20) for rank, s in winners.items())
        )
        assert {plan.text for plan in plans} == {plans[0].text}

        leaving = [rank for rank in range(world_size) if rank % nodes >= 12]
        lost = range(6)
        await asyncio.gather(
            *(replicas[rank % 3].leave(rank, winners[rank]) for rank in leaving),
            *(
                replicas[n % 3].http.delete(f"/v1/nodes/n{n}", params={"incarnation": "1"})
                for n in lost
            ),
        )
        views = [await replica.group() for replica in replicas]
        assert views[0] == views[1] == views[2]
        view = views[0]
        assert (view["phase"], view["epoch"]) == ("reduced", 1)
        assert [place["rank"] for place in view["left"]] == leaving
        assert {place["node"] for place in view["lost"]} == {f"n{n}" for n in lost}
        assert len(view["present"]) + len(view["left"]) + len(view["lost"]) == world_size
        term = (await stores[0].groups.read("train")).term
        assert term is not None
        assert {f"n{n}" for n in range(6, 12)} <= term.voters.keys()
        for n in range(nodes):  # the index of who is in which group has kept up with all that
            expected = ["train"] if f"n{n}" in term.voters else []
            assert await stores[0].nodes.groups_of(f"n{n}", "1") == expected


async def test_of_many_who_wait_only_the_first_looks_again_and_all_are_told(
    real: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("allfold_orchestrator.store.store.relay", deaf)
    monkeypatch.setattr(plan_waits, "RECHECK_SECONDS", 0.05)
    monkeypatch.setattr(plan_waits, "RECHECK_MAX_AGE", 0.01)
    ranks, looks = 40, 0
    async with (
        serving(store=Store(real.client(), LONG_LEASE)) as one,
        serving(store=Store(real.client(), LONG_LEASE)) as other,
    ):
        await one.register("a")
        for rank in range(ranks - 1):
            await one.join(rank, world_size=ranks)
        waiting = [
            asyncio.create_task(one.plan(f"s{rank}", wait=30 if rank else 0.2))
            for rank in range(ranks - 1)
        ]
        read = one.store.groups.read

        async def counted(*arguments: Any) -> GroupState:
            nonlocal looks
            looks += 1
            return await read(*arguments)

        monkeypatch.setattr(one.store.groups, "read", counted)
        assert (await within(5, waiting[0])).json()["ready"] is False  # the first one has gone
        await asyncio.sleep(0.25)  # five looks of the next one; each of all would be 190 more
        assert ranks <= looks < 2 * ranks
        await other.join(ranks - 1, world_size=ranks)
        answers = [await within(5, task) for task in waiting[1:]]
        assert all(answer.json()["ready"] is True for answer in answers)


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
