"""Leases: the silent are found out, and an outage of our own is not taken for their silence."""

from __future__ import annotations

import asyncio

import pytest

from allfold_core.errors import ServiceError
from allfold_core.plan import LinkModel
from allfold_orchestrator import background, keys, wire
from allfold_orchestrator.failures import Refusal
from allfold_orchestrator.group_state import Formation
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store import Store
from allfold_orchestrator.sweeper import Grace, Sweeper
from tests.orchestrator.builders import GROUP
from tests.orchestrator.conftest import LEASE_SECONDS, Backend, Embedded, MakeStore, ManualClock
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Replica:
    """One orchestrator without HTTP."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.service = Orchestrator(store, LinkModel())
        self.sweeper = Sweeper(store, self.service)

    async def register(self, node: str, incarnation: str = "1") -> None:
        await self.service.register_node(
            wire.RegisterNode(
                node=node,
                incarnation=incarnation,
                control_url=f"http://{node}:7401",
                data_address=f"{node}:7402",
            )
        )

    async def beat(self, *nodes: str) -> None:
        for node in nodes:
            await self.service.heartbeat(node, wire.Heartbeat(incarnation="1"))

    async def join(self, rank: int, node: str, of: int = 2, group: str = GROUP) -> None:
        await self.service.join(
            group,
            wire.JoinGroup(
                rank=rank,
                node=node,
                incarnation="1",
                session=f"s{rank}",
                world_size=of,
                timeout=30.0,
            ),
        )

    async def state_of(self, node: str) -> str:
        return {view.node: view.state for view in await self.service.nodes()}[node]


@pytest.fixture
def replica(make_store: MakeStore, clock: ManualClock) -> Replica:
    return Replica(make_store(clock))


async def run_for(replica: Replica, clock: ManualClock, seconds: float, *beating: str) -> list[str]:
    """Let time pass in steps of a second, with heartbeats and sweeps; who was evicted."""
    evicted: list[str] = []
    for _ in range(int(seconds)):
        clock.time += 1
        await replica.beat(*beating)
        evicted += await replica.sweeper.sweep()
    return evicted


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


async def test_ranks_of_a_lost_node_are_lost_in_a_complete_group(
    replica: Replica, clock: ManualClock
) -> None:
    await replica.register("a")
    await replica.register("b")
    await replica.join(0, "a")
    await replica.join(1, "b")
    assert await run_for(replica, clock, 2 * LEASE_SECONDS + 2, "a") == ["b"]
    view = await replica.service.group(GROUP)
    assert view.phase == "broken"
    assert [(place.rank, place.node) for place in view.lost] == [(1, "b")]


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
    assert (await other.service.groups()) == []
    assert await other.store.nodes.evictions() == []


async def test_a_node_that_comes_back_finishes_what_was_left_of_its_earlier_life(
    make_store: MakeStore, clock: ManualClock
) -> None:
    dying, other = Replica(make_store(clock)), Replica(make_store(clock))
    await dying.register("a")
    await dying.join(0, "a")
    assert await dying.store.nodes.evict("a", "1")
    await other.register("a")
    assert await other.service.groups() == []
    await other.join(0, "a")
    # The sweep of the first replica, which was only slow, goes on.
    await dying.service.clear_up("a", "1")
    assert [place.rank for place in (await other.service.group(GROUP)).present] == [0]


async def test_who_waits_for_a_plan_on_a_lost_node_is_told(
    replica: Replica, clock: ManualClock
) -> None:
    await replica.register("a")
    await replica.join(0, "a")
    assert isinstance(await replica.service.plan(GROUP, 1, "s0", 0), Formation)
    waiting = asyncio.create_task(replica.service.plan(GROUP, 1, "s0", 30))
    await until(lambda: replica.store.bells._waiting, "the long-poll waits")
    assert await run_for(replica, clock, LEASE_SECONDS + 2) == ["a"]
    with pytest.raises(Refusal) as caught:
        await waiting
    assert caught.value.status == 410


async def test_a_group_that_cannot_be_read_keeps_no_other_from_being_told(
    replica: Replica, clock: ManualClock, backend: Backend
) -> None:
    await replica.register("a")
    for group in ("broken", "whole"):
        await replica.join(0, "a", group=group)
    client = backend.client()
    await client.hset(keys.group("broken"), mapping={"version": "x", "meta": "{}"})
    await client.aclose()
    assert await run_for(replica, clock, LEASE_SECONDS + 2) == ["a"]
    assert [name for name in await replica.store.groups.names() if name != "broken"] == ["whole"]
    state = await replica.store.groups.read("whole")
    assert state.forming is None
    assert await replica.store.nodes.evictions() == []


async def test_the_sweeper_says_what_keeps_it_from_sweeping(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise RuntimeError("a mistake of ours")

    caplog.set_level("INFO")
    monkeypatch.setattr(replica.store, "synchronize", fails)
    monkeypatch.setattr(replica.sweeper, "_pause", 0.001)
    task = asyncio.create_task(replica.sweeper.run())
    await until(lambda: "a mistake of ours" in str(replica.sweeper.problem), "it is noticed")
    assert not task.done()
    monkeypatch.undo()
    monkeypatch.setattr(replica.sweeper, "_pause", 0.001)
    await until(lambda: replica.sweeper.problem is None, "it recovers")
    await background.end(task)
    assert [m for m in caplog.messages if m.startswith("lease")][-1] == "leases are watched"
