"""Groups in the store: joins over many replicas, guarded events and interrupted writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import WatchError

from allfold_core.errors import MultipleRegister, ServiceError
from allfold_orchestrator.membership.group_state import (
    GroupState,
    PlanReady,
    Reason,
    Rejected,
    Seated,
)
from allfold_orchestrator.store import codec, failures, keys
from allfold_orchestrator.store.groups import GroupStore
from allfold_orchestrator.store.store import Store
from tests.orchestrator.builders import GROUP, join, leave, lost, node
from tests.orchestrator.conftest import Backend, MakeStore, ManualClock, register
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


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


async def test_an_option_of_a_newer_version_is_refused_by_name_and_not_dropped(
    make_store: MakeStore, backend: Backend
) -> None:
    one, other = make_store(), make_store()
    await one.groups.submit(GROUP, join(0))
    client = backend.client()
    meta = json.loads(str(await client.hget(keys.group(GROUP), "meta")))
    meta["forming"]["params"] |= {"colour": "red", "age": 3}
    await client.hset(keys.group(GROUP), mapping={"version": "x", "meta": json.dumps(meta)})
    written = await client.hgetall(keys.group(GROUP))
    for store in (one, other):  # one that knows the group, and one that does not
        with pytest.raises(ServiceError, match=r"agree on age, colour, .*expected only world_size"):
            await store.groups.submit(GROUP, join(1, "b"))
    with pytest.raises(ServiceError, match="run the version that wrote it"):
        await one.groups.read(GROUP)
    assert await client.hgetall(keys.group(GROUP)) == written
    await client.aclose()


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
    assert states[0].last_opening == 1


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
    assert (await store.groups.read(GROUP)).last_opening == 1
    assert writes < 60  # a tenth; how many exactly depends on the version of redis-py


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
    assert sorted(changes.write) == ["meta", "plan:1", "seat:1:1", "term"]
    assert changes.delete == []


async def test_a_refused_event_writes_only_what_others_are_told(
    store: Store, backend: Backend
) -> None:
    await store.groups.submit(GROUP, join(0))
    client = backend.client()

    async def record_after_refusal() -> dict[str, str]:
        reply = await store.groups.submit(GROUP, join(0, session="other"))
        assert reply is not None
        assert isinstance(reply[0], Rejected)
        return dict(await client.hgetall(keys.group(GROUP)))

    before = await client.hgetall(keys.group(GROUP))
    after = await record_after_refusal()
    assert {name for name in after if after[name] != before[name]} == {"meta", "version"}
    assert "registered already" in after["meta"]
    assert await record_after_refusal() == after
    await client.aclose()


async def test_too_many_conflicts_end_in_an_error_that_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def conflict(*_: object) -> None:
        raise WatchError

    monkeypatch.setattr(GroupStore, "_try_write", conflict)
    monkeypatch.setattr(failures, "DEADLINE_SECONDS", 0.05)
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


async def test_a_guarded_event_needs_the_node_alive_in_this_life(store: Store) -> None:
    life = ("a", "1")
    assert await store.groups.submit(GROUP, join(0), life) is None
    await register(store, node("a", "2"))
    assert await store.groups.submit(GROUP, join(0), life) is None
    assert await store.groups.read(GROUP) == GroupState(GROUP)
    assert await store.groups.submit(GROUP, join(0, node("a", "2")), ("a", "2"))


async def test_of_lives_that_are_called_lost_one_that_is_not_over_keeps_its_seats(
    store: Store,
) -> None:
    for name in "abc":
        await register(store, node(name))
    for rank, name in enumerate("abc"):
        await store.groups.submit(GROUP, join(rank, name, of=3), (name, "1"))
    await store.nodes.evict("c", "1")
    await store.groups.submit(GROUP, lost("b", "c"))
    current = (await store.groups.read(GROUP)).current
    assert current is not None
    assert sorted(current.present) == [0, 1]


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
    assert await store.groups.submit(GROUP, join(0), ("a", "1")) is None
    assert evicted == [True]
    assert (await other.groups.read(GROUP)).forming is None
