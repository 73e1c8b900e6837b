"""Groups in a replica's cache, and records that expire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator.membership.group_state import (
    Event,
    GroupState,
    NodeHolds,
    Reason,
    Seated,
)
from allfold_orchestrator.store import codec, groups, keys, records
from allfold_orchestrator.store.records import Snapshot
from allfold_orchestrator.store.store import Store
from tests.orchestrator.builders import GROUP, join, leave, node
from tests.orchestrator.conftest import Backend, MakeStore, register

pytestmark = pytest.mark.anyio


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


async def test_an_idle_record_expires_and_its_last_opening_does_not(
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
    assert await store.groups.read(GROUP) == GroupState(GROUP, last_opening=2)
    reply = await store.groups.submit(GROUP, join(0, of=1))
    assert reply is not None
    assert reply[0] == Seated(0, opening=3, ready=True)
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


async def test_openings_that_agents_report_survive_without_a_record(
    make_store: MakeStore, backend: Backend
) -> None:
    client = backend.client()
    await make_store().groups.submit(GROUP, NodeHolds("a", 7))
    await client.delete(keys.group(GROUP))
    state = await make_store().groups.read(GROUP)
    assert (state.last_opening, state.recalled) == (7, 7)
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


async def test_a_formation_written_before_losses_were_survived_is_read_with_the_defaults(
    make_store: MakeStore, backend: Backend
) -> None:
    client = backend.client()
    await make_store().groups.submit(GROUP, join(0))
    meta = json.loads((await client.hgetall(keys.group(GROUP)))["meta"])
    for name in ("on_loss", "min_world"):
        del meta["forming"]["params"][name]
    await client.hset(keys.group(GROUP), "meta", json.dumps({**meta, "schema": 1}))
    state = await make_store().groups.read(GROUP)
    assert state.forming is not None
    assert state.forming.params == join(0).params
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
        await store.groups.submit(f"g{number}", join(0, of=1), ("a", "1"))
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
        await store.groups.submit(GROUP, join(rank, of=2), ("a", "1"))
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
