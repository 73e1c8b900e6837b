"""Groups in Redis: races, caches and what is left behind. Each test runs on both kinds of Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import WatchError

from allfold_core.errors import MultipleRegister, ServiceError
from allfold_orchestrator import codec, groups, keys, records
from allfold_orchestrator.group_state import (
    Event,
    GroupState,
    NodeHolds,
    NodeInfo,
    PlanReady,
    Reason,
    Rejected,
    Seated,
)
from allfold_orchestrator.groups import GroupStore, Guard
from allfold_orchestrator.nodes import NodeRecord
from allfold_orchestrator.records import Snapshot
from allfold_orchestrator.store import Store
from tests.orchestrator.builders import GROUP, join, leave, node
from tests.orchestrator.conftest import Backend, MakeStore, ManualClock
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def register(store: Store, info: NodeInfo) -> None:
    assert await store.nodes.register(NodeRecord(info, "0", 0.0)) is None


async def test_what_one_replica_writes_another_one_reads(make_store: MakeStore) -> None:
    one, other = make_store(), make_store()
    await one.groups.submit(GROUP, join(0, of=3, strategies={"reduce": "tree(2)"}))
    await one.groups.submit(GROUP, join(2, "b", of=3, strategies={"reduce": "tree(2)"}))
    assert await other.groups.read(GROUP) == await one.groups.read(GROUP)
    await other.groups.submit(GROUP, join(1, of=3, strategies={"reduce": "tree(2)"}))
    await other.groups.submit(GROUP, leave(1))
    state = await one.groups.read(GROUP)
    assert state == await other.groups.read(GROUP)
    assert state.current is not None
    assert state.current.departed == {1: Reason.FINISHED}


async def test_joins_over_many_replicas_make_one_complete_group(make_store: MakeStore) -> None:
    replicas = [make_store() for _ in range(4)]
    replies = await asyncio.gather(
        *(
            replicas[rank % 4].groups.submit(GROUP, join(rank, f"n{rank % 8}", of=64))
            for rank in range(64)
        )
    )
    assert [r[0].rank for r in replies if r and isinstance(r[0], Seated)] == list(range(64))
    assert sum(isinstance(i, PlanReady) for reply in replies for i in reply or ()) == 1
    states = [await replica.groups.read(GROUP) for replica in replicas]
    assert all(state == states[0] for state in states)
    assert states[0].last_epoch == 1


async def test_of_many_who_want_one_rank_exactly_one_gets_it(make_store: MakeStore) -> None:
    replicas = [make_store() for _ in range(4)]
    replies = await asyncio.gather(
        *(replicas[i % 4].groups.submit(GROUP, join(0, session=f"s{i}")) for i in range(16))
    )
    outcomes = [type(reply[0]) for reply in replies if reply]
    assert outcomes.count(Seated) == 1
    errors = [r[0].error for r in replies if r and isinstance(r[0], Rejected)]
    assert len(errors) == 15
    assert {type(error) for error in errors} == {MultipleRegister}


async def test_events_that_wait_for_a_write_are_written_together(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writes = make_store(), 0
    write = GroupStore._try_write

    async def counted(*arguments: Any) -> Any:
        nonlocal writes
        writes += 1
        return await write(*arguments)

    monkeypatch.setattr(GroupStore, "_try_write", counted)
    await asyncio.gather(*(store.groups.submit(GROUP, join(r, of=600)) for r in range(600)))
    assert (await store.groups.read(GROUP)).last_epoch == 1
    assert writes <= 4


async def test_a_join_writes_its_own_seat_and_none_of_the_others(store: Store) -> None:
    for rank in range(10):
        await store.groups.submit(GROUP, join(rank, of=20))
    before = await store.groups.read(GROUP)
    await store.groups.submit(GROUP, join(10, of=20))
    changes = codec.changes(before, await store.groups.read(GROUP))
    assert sorted(changes.write) == ["meta", "seat:1:10"]
    assert changes.delete == []


async def test_seats_stay_where_they_are_when_the_group_completes(store: Store) -> None:
    await store.groups.submit(GROUP, join(0))
    before = await store.groups.read(GROUP)
    await store.groups.submit(GROUP, join(1))
    changes = codec.changes(before, await store.groups.read(GROUP))
    assert sorted(changes.write) == ["meta", "plan:1", "seat:1:1"]
    assert changes.delete == []


async def test_a_refused_event_writes_nothing(store: Store, backend: Backend) -> None:
    await store.groups.submit(GROUP, join(0))
    client = backend.client()
    before = await client.hgetall(keys.group(GROUP))
    reply = await store.groups.submit(GROUP, join(0, session="other"))
    assert reply is not None
    assert isinstance(reply[0], Rejected)
    assert await client.hgetall(keys.group(GROUP)) == before
    await client.aclose()


async def test_too_many_conflicts_end_in_an_error_that_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conflict(*_: object) -> None:
        raise WatchError

    monkeypatch.setattr(GroupStore, "_try_write", conflict)
    monkeypatch.setattr(groups, "CONFLICT_DEADLINE_SECONDS", 0.05)
    with pytest.raises(ServiceError, match="many orchestrators at once") as caught:
        await store.groups.submit(GROUP, join(0))
    assert caught.value.details["retry"] is True


async def test_who_gives_up_before_its_turn_is_not_served_later(store: Store) -> None:
    lock = store.groups._slot(GROUP).lock
    async with lock:
        task = asyncio.create_task(store.groups.submit(GROUP, join(0)))
        await until(lambda: store.groups._slot(GROUP).batches.waiting, "the join waits")
        task.cancel()
        await asyncio.wait([task])
    await store.groups.submit(GROUP, join(1))
    state = await store.groups.read(GROUP)
    assert state.forming is not None
    assert list(state.forming.seats) == [1]


async def test_an_interrupted_write_tells_everybody_who_waited_for_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def stuck(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with store.groups._slot(GROUP).lock:
        first = asyncio.create_task(store.groups.submit(GROUP, join(0)))
        second = asyncio.create_task(store.groups.submit(GROUP, join(1)))
        await until(lambda: store.groups._slot(GROUP).batches.waiting == 2, "both wait")
        monkeypatch.setattr(GroupStore, "_try_write", stuck)
    await begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ServiceError, match="interrupted"):
        await second


# Guards


async def test_a_guarded_event_needs_the_node_alive_in_this_life(store: Store) -> None:
    guard = Guard("a", "1")
    assert await store.groups.submit(GROUP, join(0), guard) is None
    await register(store, node("a", "2"))
    assert await store.groups.submit(GROUP, join(0), guard) is None
    assert await store.groups.read(GROUP) == GroupState(GROUP)
    assert await store.groups.submit(GROUP, join(0, node("a", "2")), Guard("a", "2"))


async def test_a_node_that_dies_while_its_join_is_written_gets_no_seat(
    make_store: MakeStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make_store(clock), make_store(clock)
    await register(store, node("a", "1"))
    evicted: list[bool] = []

    @asynccontextmanager
    async def deadly_pipeline(transaction: bool = True) -> AsyncIterator[Any]:
        async with pipeline(transaction=transaction) as pipe:
            write = pipe.execute

            async def dies_first() -> Any:
                if not evicted:
                    evicted.append(await other.nodes.evict("a", "1"))
                return await write()

            pipe.execute = dies_first  # type: ignore[method-assign]
            yield pipe

    pipeline = store.groups._client.pipeline
    monkeypatch.setattr(store.groups._client, "pipeline", deadly_pipeline)
    assert await store.groups.submit(GROUP, join(0), Guard("a", "1")) is None
    assert evicted == [True]
    assert (await other.groups.read(GROUP)).forming is None


# What is cached, and what is forgotten


async def test_a_fresh_look_needs_no_request_and_an_announcement_asks_for_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.groups.read(GROUP)
    loads: list[str] = []

    def counted(*arguments: Any) -> Awaitable[Snapshot]:
        loads.append("load")
        return load(*arguments)

    load = store.groups._load
    monkeypatch.setattr(store.groups, "_load", counted)
    await store.groups.read(GROUP, max_age=60)
    assert loads == []
    store.groups.invalidate(GROUP)
    await store.groups.read(GROUP, max_age=60)
    assert loads == ["load"]


async def test_an_announcement_during_a_read_is_not_lost(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = codec.decode

    def announced_meanwhile(group: str, record: dict[str, str]) -> GroupState:
        store.groups.invalidate(GROUP)
        return decode(group, record)

    await store.groups.submit(GROUP, join(0))
    store.groups._slots.clear()
    monkeypatch.setattr(codec, "decode", announced_meanwhile)
    await store.groups.read(GROUP)
    assert store.groups._slot(GROUP).checked_at == float("-inf")


@pytest.mark.parametrize(
    ("missed", "readings"), [(0, 0), (1, 0), (records.LOG_ENTRIES, 0), (records.LOG_ENTRIES + 1, 1)]
)
async def test_a_replica_reads_everything_only_when_it_missed_too_much(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, missed: int, readings: int
) -> None:
    writer, reader, whole = make_store(), make_store(), 0
    await writer.groups.submit(GROUP, join(0, of=40))
    await reader.groups.read(GROUP)
    decode = codec.decode

    def counted(*arguments: Any) -> GroupState:
        nonlocal whole
        whole += 1
        return decode(*arguments)

    for rank in range(1, missed + 1):
        await writer.groups.submit(GROUP, join(rank, of=40))
    monkeypatch.setattr(codec, "decode", counted)
    assert await reader.groups.read(GROUP) == await writer.groups.read(GROUP)
    assert whole == readings


async def test_a_write_of_many_seats_is_read_whole(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LOGGED_FIELDS", 5)
    writer, reader = make_store(), make_store()
    await writer.groups.submit(GROUP, join(0, of=9))
    await reader.groups.read(GROUP)
    await asyncio.gather(*(writer.groups.submit(GROUP, join(r, of=9)) for r in range(1, 9)))
    await writer.groups.submit(GROUP, leave(3))
    assert await reader.groups.read(GROUP) == await writer.groups.read(GROUP)


async def test_an_idle_record_expires_and_its_last_epoch_does_not(
    make_store: MakeStore, backend: Backend
) -> None:
    store, client = make_store(), backend.client()
    await store.groups.submit(GROUP, join(0, of=1))
    assert await client.ttl(keys.group(GROUP)) == -1  # type: ignore[attr-defined]
    await store.groups.submit(GROUP, leave(0))
    assert await client.ttl(keys.group(GROUP)) > 3600  # type: ignore[attr-defined]
    await store.groups.submit(GROUP, join(0, of=1))
    assert await client.ttl(keys.group(GROUP)) == -1  # type: ignore[attr-defined]
    await store.groups.submit(GROUP, leave(0))
    await client.delete(keys.group(GROUP))
    assert await store.groups.read(GROUP) == GroupState(GROUP, last_epoch=2)
    reply = await store.groups.submit(GROUP, join(0, of=1))
    assert reply is not None
    assert reply[0] == Seated(0, epoch=3, ready=True)
    assert await client.ttl(keys.group(GROUP)) == -1  # type: ignore[attr-defined]
    await client.aclose()


async def test_a_record_made_anew_is_not_taken_for_the_one_in_the_cache(
    make_store: MakeStore, backend: Backend
) -> None:
    one, other, client = make_store(), make_store(), backend.client()
    await one.groups.submit(GROUP, join(0, of=1))
    await client.delete(keys.group(GROUP), keys.tombstone(GROUP))
    await other.groups.submit(GROUP, join(0, "b", of=1))
    assert await one.groups.read(GROUP) == await other.groups.read(GROUP)
    await client.aclose()


async def test_epochs_that_agents_report_survive_without_a_record(
    make_store: MakeStore, backend: Backend
) -> None:
    client = backend.client()
    await make_store().groups.submit(GROUP, NodeHolds("a", 7))
    await client.delete(keys.group(GROUP))
    state = await make_store().groups.read(GROUP)
    assert (state.last_epoch, state.recalled) == (7, 7)
    await client.aclose()


async def test_a_damaged_record_is_an_error_that_names_its_key(
    make_store: MakeStore, backend: Backend
) -> None:
    client = backend.client()
    await client.hset(keys.group(GROUP), mapping={"version": "1", "meta": "{}"})
    with pytest.raises(ServiceError, match=keys.group(GROUP)):
        await make_store().groups.read(GROUP)
    with pytest.raises(ServiceError, match=keys.group(GROUP)):
        await make_store().groups.submit(GROUP, join(0))
    await client.aclose()


async def test_the_list_of_groups_loses_those_without_a_record(
    store: Store, backend: Backend
) -> None:
    client = backend.client()
    for name in ("kept", "gone"):
        await store.groups.submit(name, join(0))
    assert await store.groups.names() == ["gone", "kept"]
    await client.delete(keys.group("gone"))
    for name in ("kept", "gone"):
        await store.groups.prune(name)
    assert await store.groups.names() == ["kept"]
    await client.aclose()


async def test_names_without_a_record_go_a_few_at_a_time(store: Store, backend: Backend) -> None:
    client = backend.client()
    for number in range(groups.PRUNED_AT_ONCE):
        await store.groups.submit(f"g{number}", join(0))
        await client.delete(keys.group(f"g{number}"))
    await store.groups.prune_some()
    assert await store.groups.names() == []
    await client.aclose()


async def test_hundreds_of_groups_that_are_over_leave_nothing_that_stays_for_ever(
    store: Store, backend: Backend
) -> None:
    client = backend.client()
    await register(store, node("a"))
    for number in range(200):
        await store.groups.submit(f"g{number}", join(0, of=1), Guard("a", "1"))
        await store.groups.submit(f"g{number}", leave(0))
    assert await store.nodes.groups_of("a", "1") == []
    for number in range(200):
        for key in (keys.group(f"g{number}"), keys.tombstone(f"g{number}")):
            assert await client.ttl(key) > 0  # type: ignore[attr-defined]
    await client.aclose()


async def test_a_node_is_kept_on_the_list_of_its_groups_while_one_of_its_ranks_sits(
    store: Store,
) -> None:
    await register(store, node("a"))
    for rank in (0, 1):
        await store.groups.submit(GROUP, join(rank, of=2), Guard("a", "1"))
    await store.groups.submit(GROUP, leave(0))
    assert await store.nodes.groups_of("a", "1") == [GROUP]
    await store.groups.submit(GROUP, leave(1))
    assert await store.nodes.groups_of("a", "1") == []


async def test_the_cache_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_CACHED_GROUPS", 8)
    for number in range(30):
        await store.groups.read(f"g{number}")
    assert len(store.groups._slots) <= 8


EVENTS: list[Event] = [
    join(0, "a", of=3),
    join(1, "b", of=3),
    leave(0),
    join(0, "c", of=3),
    join(2, "b", of=3),
    leave(1, Reason.LOST),
    join(1, "d", of=2, session="new"),
    leave(0),
    join(0, "c", of=2),
    leave(2),
]


async def test_every_step_is_the_same_read_from_memory_and_from_the_store(
    make_store: MakeStore,
) -> None:
    writer = make_store()
    for event in EVENTS:
        await writer.groups.submit(GROUP, event)
        assert await make_store().groups.read(GROUP) == await writer.groups.read(GROUP)
