"""Nodes in Redis: leases, heartbeats and ends. Each test runs on both kinds of Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import WatchError

from allfold_core.errors import Evicted, MultipleRegister, ServiceError
from allfold_orchestrator.membership.group_state import NodeInfo
from allfold_orchestrator.membership.nodes import NodeRecord
from allfold_orchestrator.store import failures, keys
from allfold_orchestrator.store.life import DEPARTED_SECONDS, StoreClock, TurnIsOver
from allfold_orchestrator.store.node_store import NodeStatus, NodeStore
from allfold_orchestrator.store.store import Store
from tests.orchestrator.builders import GROUP, join, node
from tests.orchestrator.conftest import LEASE_SECONDS, Backend, MakeStore, ManualClock, register
from tests.support.waiting import within

pytestmark = pytest.mark.anyio

PROGRESS = [{"group": GROUP, "epoch": 1, "last_seq": 41, "in_flight": 1}]


def record(info: NodeInfo | None = None) -> NodeRecord:
    return NodeRecord(info or node(), registered_at=1000.0)


async def statuses(store: Store) -> list[NodeStatus]:
    return await store.nodes.statuses(await store.nodes.names())


async def test_a_registered_node_is_there_with_a_running_lease(
    store: Store, clock: ManualClock
) -> None:
    assert await store.nodes.register(record()) is None
    assert await store.nodes.get("a") == record()
    (status,) = await statuses(store)
    assert status.record == record()
    assert status.lease_expiry == clock.time + LEASE_SECONDS
    assert status.progress == ()


async def test_a_heartbeat_extends_the_lease_and_keeps_the_progress(
    store: Store, clock: ManualClock
) -> None:
    await store.nodes.register(record())
    clock.time += 3
    assert await store.nodes.heartbeat("a", "1", PROGRESS)
    (status,) = await statuses(store)
    assert status.lease_expiry == clock.time + LEASE_SECONDS
    assert status.progress == tuple(PROGRESS)


async def test_a_heartbeat_of_an_unknown_life_starts_no_lease(store: Store) -> None:
    await store.nodes.register(record())
    assert not await store.nodes.heartbeat("b", "1", [])
    assert not await store.nodes.heartbeat("a", "2", [])
    assert [status.record.info.node for status in await statuses(store)] == ["a"]


async def test_a_lease_is_over_when_its_time_has_passed(store: Store, clock: ManualClock) -> None:
    await store.nodes.register(record())
    assert await store.nodes.expired(clock.time + LEASE_SECONDS) == []
    assert await store.nodes.expired(clock.time + LEASE_SECONDS + 0.01) == [("a", "1")]


async def test_of_many_replicas_exactly_one_evicts(
    make_store: MakeStore, clock: ManualClock
) -> None:
    replicas = [make_store(clock) for _ in range(4)]
    await replicas[0].nodes.register(record())
    won = await asyncio.gather(*(replica.nodes.evict("a", "1") for replica in replicas))
    assert sorted(won) == [False, False, False, True]
    assert await replicas[0].nodes.evictions() == [("a", "1")]


async def test_a_lease_that_was_extended_at_the_last_moment_is_not_ended(
    store: Store, clock: ManualClock
) -> None:
    await store.nodes.register(record())
    clock.time += LEASE_SECONDS + 1
    assert await store.nodes.expired(clock.time) == [("a", "1")]
    assert await store.nodes.heartbeat("a", "1", [])
    assert not await store.nodes.evict("a", "1", expired_at=clock.time)
    assert await store.nodes.evict("a", "1")


async def test_what_was_decided_in_a_turn_that_is_over_changes_nothing(
    store: Store, make_store: MakeStore, backend: Backend
) -> None:
    await register(store, node("a"))
    other, client = make_store(), backend.client()
    async with store.decisions.turn() as mine:
        await client.delete(keys.DETECTOR)  # it was stopped for longer than a turn
        with pytest.raises(TurnIsOver):
            await store.nodes.evict("a", "1", turn=mine)
        async with other.decisions.turn() as others:
            with pytest.raises(TurnIsOver):
                await store.nodes.evict("a", "1", turn=mine)
            assert await other.nodes.evict("a", "1", turn=others)
    await client.aclose()


async def test_a_node_that_is_gone_stays_in_the_list_for_an_hour(
    store: Store, clock: ManualClock
) -> None:
    await store.nodes.register(record())
    await store.nodes.evict("a", "1")
    (status,) = await statuses(store)
    assert status.lease_expiry is None
    assert status.record.lost_at == clock.time
    clock.time += DEPARTED_SECONDS + 1
    assert await statuses(store) == []


async def test_a_node_that_comes_back_is_no_longer_gone(store: Store, clock: ManualClock) -> None:
    await store.nodes.register(record())
    await store.nodes.evict("a", "1")
    assert isinstance(await store.nodes.register(record()), Evicted), "not in the same life"
    assert await store.nodes.register(record(node("a", "2"))) is None
    clock.time += DEPARTED_SECONDS + 1
    (status,) = await statuses(store)
    assert status.record.lost_at is None


async def test_a_restarted_node_ends_its_earlier_life(store: Store, clock: ManualClock) -> None:
    await store.nodes.register(record())
    replaced = await store.nodes.register(record(node("a", "2")))
    assert replaced == node("a", "1")
    assert await store.nodes.evictions() == [("a", "1")]
    assert await store.nodes.expired(clock.time + 60) == [("a", "2")]
    assert not await store.nodes.heartbeat("a", "1", [])


async def test_a_refused_node_changes_nothing(store: Store) -> None:
    await store.nodes.register(record())
    refusal = await store.nodes.register(record(node("a", "2", data_address="elsewhere:1")))
    assert isinstance(refusal, MultipleRegister)
    assert await store.nodes.get("a") == record()
    assert await store.nodes.evictions() == []


async def test_of_two_nodes_that_want_one_name_at_once_one_is_refused(
    make_store: MakeStore, clock: ManualClock
) -> None:
    one, other = make_store(clock), make_store(clock)
    outcomes = await asyncio.gather(
        one.nodes.register(record(node("a", "1"))),
        other.nodes.register(record(node("a", "2", data_address="elsewhere:1"))),
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "MultipleRegister",
        "NoneType",
    ]


async def test_the_groups_of_a_life_are_remembered_until_they_are_cleared_up(
    store: Store,
) -> None:
    await store.nodes.register(record())
    for group in ("g2", "g1"):
        await store.groups.submit(group, join(0), ("a", "1"))
    assert await store.nodes.groups_of("a", "1") == ["g1", "g2"]
    await store.nodes.evict("a", "1")
    await store.nodes.forget_eviction("a", "1")
    assert await store.nodes.groups_of("a", "1") == []
    assert await store.nodes.evictions() == []


async def test_clearing_up_late_does_not_forget_the_groups_of_a_node_that_came_back(
    store: Store, backend: Backend
) -> None:
    await store.nodes.register(record())
    await store.nodes.evict("a", "1")
    client = backend.client()
    await client.delete(keys.node("a"))  # so that it may come back as the same life
    await client.aclose()
    await store.nodes.register(record())
    await store.groups.submit(GROUP, join(0), ("a", "1"))
    await store.nodes.forget_eviction("a", "1")
    assert await store.nodes.groups_of("a", "1") == [GROUP]


async def test_nothing_of_a_forgotten_node_stays_for_ever(store: Store, backend: Backend) -> None:
    client = backend.client()
    await store.nodes.register(record())
    await store.nodes.heartbeat("a", "1", PROGRESS)
    await store.nodes.evict("a", "1")
    await store.nodes.forget_eviction("a", "1")
    for key in (keys.node("a"), keys.progress("a")):
        assert await client.ttl(key) > 0  # type: ignore[attr-defined]
    await client.aclose()


async def test_more_requests_at_once_than_connections_are_all_served(store: Store) -> None:
    await store.nodes.register(record())
    answers = await asyncio.gather(*(store.nodes.get("a") for _ in range(500)))
    assert answers == [record()] * 500


async def test_replicas_read_the_same_clock(backend: Backend) -> None:
    clients = [backend.client(), backend.client()]
    clocks = [StoreClock(client) for client in clients]
    clocks[0]._offset = -1e6  # a replica whose own clock is far off
    for each in clocks:
        await each.synchronize()
    assert abs(clocks[0].now() - clocks[1].now()) < 0.5
    for client in clients:
        await client.aclose()


async def test_nodes_that_others_keep_writing_end_in_an_error_that_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conflict(*_: object) -> None:
        raise WatchError

    await store.nodes.register(record())
    for attempt in ("_try_register", "_try_evict", "_try_forget"):
        monkeypatch.setattr(NodeStore, attempt, conflict)
    monkeypatch.setattr(failures, "DEADLINE_SECONDS", 0.05)
    for request in (
        store.nodes.register(record(node("b"))),
        store.nodes.evict("a", "1"),
        store.nodes.forget_eviction("a", "1"),
    ):
        with pytest.raises(ServiceError, match="many orchestrators at once") as caught:
            await within(5, request)
        assert caught.value.details["retry"] is True


async def test_two_of_one_name_that_register_at_once_are_told_apart(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.nodes.register(record(node(f"n{i}"))) for i in range(5)),
        store.nodes.register(record(node("n3", "2", data_address="elsewhere:1"))),
        store.nodes.register(record(node("n4", "2"))),
    )
    assert outcomes[:5] == [None] * 5
    assert isinstance(outcomes[5], MultipleRegister)
    assert outcomes[6] == node("n4")
    assert await store.nodes.evictions() == [("n4", "1")]


async def test_heartbeats_that_come_together_are_one_write_with_a_reply_each(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        await store.nodes.register(record(node(name)))
    pipelines = 0
    pipeline = store.nodes._client.pipeline

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal pipelines
        pipelines += 1
        return pipeline(*arguments, **options)

    monkeypatch.setattr(store.nodes._client, "pipeline", counted)
    said = [{"group": "train", "epoch": 1, "last_seq": 7, "in_flight": 0}]
    lives = [("a", "1"), ("b", "2"), ("b", "1"), ("nobody", "1")] * 20
    replies = await asyncio.gather(*(store.nodes.heartbeat(*life, said) for life in lives))
    assert replies == [life in (("a", "1"), ("b", "1")) for life in lives]
    assert pipelines <= 2
    progress = {status.record.info.node: status.progress for status in await statuses(store)}
    assert progress == {"a": tuple(said), "b": tuple(said)}
