"""Leases: the silent are found out, and an outage of our own is not taken for their silence."""

from __future__ import annotations

import asyncio
import re

import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator import background
from allfold_orchestrator.membership.group_state import (
    GroupState,
    Leave,
    Reason,
)
from allfold_orchestrator.store import keys, life
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import (
    Grace,
)
from tests.orchestrator.builders import GROUP
from tests.orchestrator.conftest import LEASE_SECONDS, Backend, Embedded, MakeStore, ManualClock
from tests.orchestrator.sweeping import Replica, run_for
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def replica(make_store: MakeStore, clock: ManualClock) -> Replica:
    return Replica(make_store(clock))


# The rule of grace, by itself


@pytest.mark.parametrize(
    ("sweeps", "allowed"),
    [
        ([100.0], [False]),
        ([100.0, 101, 102, 103, 104], [False] * 5),
        ([100.0, 102, 104, 106], [False, False, False, True]),
        # An outage of more than half a lease: grace begins anew, from its end.
        ([100.0, 102, 104, 106, 109, 111, 113, 114], [0, 0, 0, 1, 0, 0, 0, 1]),
        # One of less is not noticed: the leases are longer than that.
        ([100.0, 102, 104, 106, 108.4], [0, 0, 0, 1, 1]),
        # The shared clock fell back: nobody's lease can be trusted.
        ([100.0, 102, 104, 106, 50, 51], [0, 0, 0, 1, 0, 0]),
    ],
)
def test_grace_lasts_a_lease_after_every_gap(sweeps: list[float], allowed: list[bool]) -> None:
    grace = Grace(LEASE_SECONDS)
    assert [grace.allows_eviction(now) for now in sweeps] == [bool(flag) for flag in allowed]


# Sweeping


async def test_a_node_that_falls_silent_is_lost_and_its_seats_are_free(
    replica: Replica, clock: ManualClock
) -> None:
    await replica.register("a")
    await replica.register("b")
    await replica.join(0, "a", of=3)
    await replica.join(1, "b", of=3)
    assert await run_for(replica, clock, LEASE_SECONDS + 1, "a", "b") == []
    assert await run_for(replica, clock, LEASE_SECONDS, "a") == []
    assert await run_for(replica, clock, 1, "a") == ["b"]
    assert await replica.state_of("b") == "gone"
    view = await replica.service.group(GROUP)
    assert (view.phase, view.missing) == ("forming", [1, 2])


async def test_a_store_that_refuses_writes_for_a_while_costs_nobody_its_lease(
    replica: Replica, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("fine", "dead"):
        await replica.register(node)
    assert await run_for(replica, clock, LEASE_SECONDS + 2, "fine", "dead") == []

    async def refused() -> None:
        raise ServiceError("OOM")

    monkeypatch.setattr(replica.store, "prove_writable", refused)
    for _ in range(int(2 * LEASE_SECONDS)):
        clock.time += 1
        with pytest.raises(ServiceError):
            await replica.sweeper.sweep()
    monkeypatch.undo()
    assert await replica.sweeper.sweep() == []
    assert await run_for(replica, clock, LEASE_SECONDS, "fine") == ["dead"]


async def test_a_node_is_late_before_it_is_gone(replica: Replica, clock: ManualClock) -> None:
    await replica.register("a")
    assert await replica.state_of("a") == "alive"
    clock.time += LEASE_SECONDS + 0.5
    assert await replica.state_of("a") == "late"


async def test_a_sweeper_that_has_just_started_gives_everybody_a_lease_to_be_heard(
    make_store: MakeStore, clock: ManualClock
) -> None:
    before = Replica(make_store(clock))
    await before.register("fine")
    await before.register("dead")
    clock.time += 3600  # the orchestrator was away; the agents were not
    after = Replica(make_store(clock))
    assert await after.sweeper.sweep() == []
    assert await run_for(after, clock, LEASE_SECONDS - 1, "fine") == []
    assert await run_for(after, clock, 1, "fine") == ["dead"]
    assert await after.state_of("fine") == "alive"


async def test_nobody_is_lost_because_the_store_was_away(clock: ManualClock) -> None:
    backend = Embedded()
    replica = Replica(Store(backend.client(), LEASE_SECONDS, clock))
    await replica.register("fine")
    await replica.register("dead")
    assert await run_for(replica, clock, LEASE_SECONDS + 2, "fine", "dead") == []
    backend.server.connected = False
    for _ in range(60):
        clock.time += 1
        with pytest.raises(ServiceError):
            await replica.sweeper.sweep()
        with pytest.raises(ServiceError):
            await replica.beat("fine")
    backend.server.connected = True
    assert await replica.sweeper.sweep() == []  # every lease looks expired
    assert await run_for(replica, clock, LEASE_SECONDS - 1, "fine") == []
    assert await run_for(replica, clock, 1, "fine") == ["dead"]
    await replica.store.close()


async def test_two_replicas_evict_a_node_once(make_store: MakeStore, clock: ManualClock) -> None:
    replicas = [Replica(make_store(clock)), Replica(make_store(clock))]
    await replicas[0].register("a")
    evicted: list[str] = []
    for _ in range(int(LEASE_SECONDS) + 3):
        clock.time += 1
        for names in await asyncio.gather(*(each.sweeper.sweep() for each in replicas)):
            evicted += names
    assert evicted == ["a"]


async def test_what_a_dying_replica_left_half_done_is_finished_by_another(
    make_store: MakeStore, clock: ManualClock
) -> None:
    dying, other = Replica(make_store(clock)), Replica(make_store(clock))
    await dying.register("a")
    await dying.join(0, "a")
    assert await dying.store.nodes.evict("a", "1")  # and here its power fails
    await other.sweeper.sweep()
    assert await other.groups() == []
    assert await other.store.nodes.evictions() == []


async def test_a_node_that_comes_back_finishes_what_was_left_of_its_earlier_life(
    make_store: MakeStore, clock: ManualClock
) -> None:
    dying, other = Replica(make_store(clock)), Replica(make_store(clock))
    await dying.register("a")
    await dying.join(0, "a")
    assert await dying.store.nodes.evict("a", "1")
    await other.register("a", "2")
    assert await other.groups() == []
    await other.join(0, "a", incarnation="2")
    # The sweep of the first replica, which was only slow, goes on.
    await dying.service.clear_up([("a", "1")])
    assert [place.rank for place in (await other.service.group(GROUP)).present] == [0]


async def test_who_waits_for_a_plan_on_a_lost_node_is_told(
    replica: Replica, clock: ManualClock
) -> None:
    await replica.register("a")
    await replica.join(0, "a")
    assert isinstance(await replica.service.plan(GROUP, 1, "s0", 0), GroupState)
    waiting = asyncio.create_task(replica.service.plan(GROUP, 1, "s0", 30))
    await until(lambda: replica.store.notifications._waiting, "the long-poll waits")
    assert await run_for(replica, clock, LEASE_SECONDS + 2) == ["a"]
    with pytest.raises(Refusal) as caught:
        await waiting
    assert caught.value.status == 410


async def test_a_group_that_cannot_be_read_keeps_no_other_from_being_told(
    replica: Replica, backend: Backend
) -> None:
    await replica.register("a")
    for group in ("broken", "whole"):
        await replica.join(0, "a", group=group)
    client = backend.client()
    await client.hset(keys.group("broken"), mapping={"version": "x", "meta": "{}"})
    await client.aclose()
    await replica.service.remove_node("a", "1")
    assert [name for name in await replica.store.groups.names() if name != "broken"] == ["whole"]
    state = await replica.store.groups.read("whole")
    assert state.forming is None
    assert await replica.store.nodes.evictions() == []


DAMAGED = ["{", "[]", "null", '{"schema": 1}', '{"schema": 1, "info": {}}']
NEWER = '{"schema": 99, "something": "else"}'


@pytest.mark.parametrize("text", DAMAGED)
async def test_a_damaged_record_of_a_node_keeps_none_from_being_swept(
    replica: Replica, clock: ManualClock, backend: Backend, text: str
) -> None:
    for node in ("damaged", "whole"):
        await replica.register(node)
        await replica.join(0, node, group=f"of-{node}")
    client = backend.client()
    await client.set(keys.node("damaged"), text)
    await client.aclose()
    assert sorted(await run_for(replica, clock, LEASE_SECONDS + 2)) == ["damaged", "whole"]
    assert await replica.groups() == []
    assert await replica.store.nodes.evictions() == []


async def test_a_record_of_a_newer_version_is_left_alone_and_keeps_no_other_from_being_swept(
    replica: Replica, clock: ManualClock, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    for node in ("newer", "whole"):
        await replica.register(node)
    client = backend.client()
    await client.set(keys.node("newer"), NEWER)
    assert await run_for(replica, clock, LEASE_SECONDS + 4) == ["whole"]
    assert await client.get(keys.node("newer")) == NEWER
    await client.aclose()
    told = [m for m in caplog.messages if "has schema 99 and is read here up to schema 1" in m]
    assert len(told) == 1


async def test_a_key_that_holds_something_else_keeps_no_other_node_from_being_swept(
    replica: Replica, clock: ManualClock, backend: Backend
) -> None:
    for node in ("changed", "whole"):
        await replica.register(node)
    client = backend.client()
    await client.delete(keys.node("changed"))
    await client.sadd(keys.node("changed"), "from outside")
    await client.aclose()
    assert await run_for(replica, clock, LEASE_SECONDS + 2) == ["whole"]


async def test_a_node_with_a_damaged_record_registers_again_and_all_is_well(
    replica: Replica, backend: Backend
) -> None:
    for node in ("a", "b"):
        await replica.register(node)
    client = backend.client()
    await client.set(keys.node("a"), "{")
    await client.set(keys.progress("b"), "{")
    await client.aclose()
    assert [view.node for view in (await replica.service.nodes("", 9)).nodes] == ["b"]
    with pytest.raises(Refusal) as caught:
        await replica.join(0, "a")
    assert caught.value.status == 404  # upon which the agent registers
    await replica.register("a")
    await replica.join(0, "a")
    assert [view.node for view in (await replica.service.nodes("", 9)).nodes] == ["a", "b"]


async def test_a_node_cannot_replace_the_record_of_a_newer_version(
    replica: Replica, backend: Backend
) -> None:
    client = backend.client()
    await client.set(keys.node("a"), NEWER)
    await client.aclose()
    both = (replica.register("a"), replica.register("b"))
    refused, registered = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(refused, ServiceError)
    assert refused.details["key"] == keys.node("a")
    assert registered is None


async def test_a_group_that_cannot_be_read_is_listed_as_such_among_the_others(
    replica: Replica, backend: Backend
) -> None:
    await replica.register("a")
    for group in ("damaged", "newer", "whole"):
        await replica.join(0, "a", group=group)
    client = backend.client()
    await client.hset(keys.group("damaged"), mapping={"version": "x", "meta": "{"})
    await client.hset(keys.group("newer"), mapping={"version": "x", "meta": NEWER})
    await client.aclose()
    phases = {view.group: view.phase for view in await replica.groups()}
    assert phases == {"damaged": "unreadable", "newer": "unreadable", "whole": "forming"}
    with pytest.raises(ServiceError, match="run the version that wrote it"):
        await replica.service.group("newer")
    with pytest.raises(ServiceError, match="it is damaged; delete it"):
        await replica.service.group("damaged")


async def test_what_is_over_does_not_pile_up(
    replica: Replica, clock: ManualClock, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_DEPARTED", "MAX_IDLE_GROUPS", "MAX_TOMBSTONES"):
        monkeypatch.setattr(life, limit, 3)
    client = backend.client()
    for number in range(20):
        node, group = f"n{number:02}", f"g{number:02}"
        await replica.register(node)
        await replica.beat(node)
        await replica.join(0, node, of=1, group=group)
        await replica.service.remove_node(node, "1")
        clock.time += 1
        await replica.sweeper.sweep()
    for _ in range(3):
        await replica.sweeper.sweep()
    assert await replica.store.nodes.names() == ["n17", "n18", "n19"]
    assert [view.group for view in await replica.groups()] == ["g17", "g18", "g19"]
    left = await client.keys("*")  # type: ignore[attr-defined]
    assert len(left) <= 6 + 3 * 5, sorted(left)
    clock.time += life.TOMBSTONE_SECONDS + 1
    await replica.sweeper.sweep()
    for _ in range(3):
        await replica.store.groups.prune_some()
    left = await client.keys("*")  # type: ignore[attr-defined]
    assert sorted(left) == sorted([keys.STORE, keys.SWEPT])
    await client.aclose()


async def test_a_group_that_came_back_is_not_taken_for_one_that_is_over(
    replica: Replica, clock: ManualClock
) -> None:
    await replica.register("a")
    await replica.join(0, "a", of=1)
    await replica.service.leave(GROUP, Leave(0, "s0", Reason.FINISHED))
    await replica.join(0, "a", of=1)
    clock.time += life.TOMBSTONE_SECONDS + 1
    await replica.store.retention.apply(clock.time)
    assert [view.phase for view in await replica.groups()] == ["ready"]


async def test_the_sweeper_says_what_keeps_it_from_sweeping(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise RuntimeError("a mistake of ours")

    caplog.set_level("INFO")
    monkeypatch.setattr(replica.store, "synchronize", fails)
    monkeypatch.setattr(replica.sweeper, "_pause", 0.001)
    task = asyncio.create_task(replica.sweeper.run())
    await until(lambda: "the log says why" in str(replica.sweeper.problem), "it is noticed")
    assert "a mistake of ours" in caplog.text
    assert not task.done()
    monkeypatch.undo()
    monkeypatch.setattr(replica.sweeper, "_pause", 0.001)
    await until(lambda: replica.sweeper.problem is None, "it recovers")
    await background.end(task)
    last = [each for each in caplog.messages if each.startswith("lease")][-1]
    assert re.fullmatch(r"leases are watched again, after \d+\.\d s", last)
