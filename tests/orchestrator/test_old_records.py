"""The store goes back to the record of a group whose nodes are gone: its name is free soon."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from allfold_core.errors import ServiceError
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import AgentRegisters, Leave, Reason, Seated
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.store import keys
from allfold_orchestrator.sweeper import LOOK_AGAIN_SECONDS, WANTED_SECONDS, Grace
from tests.orchestrator.builders import GROUP
from tests.orchestrator.conftest import LEASE_SECONDS, Backend, MakeStore, ManualClock
from tests.orchestrator.sweeping import Replica, run_for

pytestmark = pytest.mark.anyio

SOON = LEASE_SECONDS + 3
"""The grace, and what the sweeps take; less than a group has whose nodes were heard lately."""


@pytest.fixture
def replica(make_store: MakeStore, clock: ManualClock) -> Replica:
    return Replica(make_store(clock))


async def open_group(replica: Replica, max_world: int | None) -> TermRecord:
    """Open a group of a rank each on nodes a and b; return its record."""
    for node in "abc":
        await replica.register(node)
    for rank, node in enumerate("ab"):
        await replica.join(rank, node, max_world=max_world)
    return await record_of(replica)


async def record_of(replica: Replica) -> TermRecord:
    record = term_record(await replica.store.groups.read(GROUP))
    assert record is not None
    return record


async def go_back(replica: Replica) -> None:
    """The store is set back to what it has now."""
    lives = replica.store.lives
    await lives.outgrow((await lives.read()).generation)


async def report(replica: Replica, node: str, held: TermRecord, until: float) -> None:
    """A node registers what it holds."""
    store = await replica.store.lives.read()
    said = AgentRegisters((node, "1"), held.generation, held, store, until)
    await replica.store.groups.submit(GROUP, said)


async def init(
    replica: Replica, clock: ManualClock, seconds: float, max_world: int | None, *beating: str
) -> Seated | None:
    """A rank on node c asks for a seat of its own until it has one, or its time is over."""
    for _ in range(int(seconds)):
        try:
            seated = await replica.join(0, "c", of=1, max_world=max_world, session="new")
        except ServiceError:
            seated = None
        if seated is not None and (seated.ready or await is_open_for(replica, "c")):
            return seated
        await run_for(replica, clock, 1, "c", *beating)
    return None


async def is_open_for(replica: Replica, *nodes: str) -> bool:
    view = await replica.service.group(GROUP)
    return view.phase == "ready" and [each.node for each in view.present] == [*nodes]


@pytest.mark.parametrize("max_world", [None, 4], ids=["fixed", "elastic"])
@pytest.mark.parametrize("silent_for", [0, 2 * WANTED_SECONDS], ids=["recent", "old"])
async def test_a_group_none_of_whose_nodes_registers_again_gives_its_name_to_who_waits(
    replica: Replica, clock: ManualClock, max_world: int | None, silent_for: float
) -> None:
    await open_group(replica, max_world)
    await run_for(replica, clock, silent_for, "c")
    await go_back(replica)
    assert await init(replica, clock, 2 * SOON, max_world)
    assert await is_open_for(replica, "c")
    assert (await record_of(replica)).opening > 1


async def test_a_group_keeps_its_name_where_a_node_registers_again(
    replica: Replica, clock: ManualClock
) -> None:
    held = await open_group(replica, None)
    await run_for(replica, clock, 2 * WANTED_SECONDS, "a", "b", "c")
    await go_back(replica)
    await report(replica, "a", held, clock.time + LEASE_SECONDS)
    await replica.service.leave(GROUP, Leave(1, "s1", Reason.LOST))
    assert await init(replica, clock, 2 * WANTED_SECONDS, None, "a") is None
    assert (await record_of(replica)).opening == 1


async def test_while_nodes_may_still_register_an_old_record_stays(
    replica: Replica, clock: ManualClock
) -> None:
    """Their leases are those of the snapshot: long over."""
    held = await open_group(replica, 4)
    await run_for(replica, clock, 2 * WANTED_SECONDS, "c")
    await go_back(replica)
    assert await init(replica, clock, LEASE_SECONDS - 1, 4) is None
    for node in "ab":
        await report(replica, node, held, clock.time + LEASE_SECONDS)
        await replica.beat(node)
    seated = await init(replica, clock, SOON, 4, "a", "b")
    assert seated == Seated(2, 1, ready=True)


async def test_nobody_gets_a_seat_among_silent_nodes_that_nobody_can_evict(
    replica: Replica, clock: ManualClock
) -> None:
    """They would have to agree to take it in."""
    held = await open_group(replica, max_world=4)
    await go_back(replica)
    await report(replica, "a", held, clock.time + LEASE_SECONDS)
    await run_for(replica, clock, 2 * LEASE_SECONDS, "c")
    with pytest.raises(ServiceError, match="none of its nodes is heard"):
        await replica.join(0, "c", max_world=4, session="new")
    await replica.beat("a")
    assert (await replica.join(0, "c", max_world=4, session="new")).ready


@pytest.mark.parametrize("max_world", [None, 4], ids=["fixed", "elastic"])
@pytest.mark.parametrize("registers", ["", "a"], ids=["none", "one"])
async def test_nodes_that_a_store_without_their_leases_has_in_a_group_do_not_hold_its_name(
    replica: Replica,
    clock: ManualClock,
    backend: Backend,
    max_world: int | None,
    registers: Sequence[str],
) -> None:
    """A store that was emptied has only what those say that register."""
    held = await open_group(replica, max_world)
    await replica.service.leave(GROUP, Leave(1, "s1", Reason.LOST))
    await run_for(replica, clock, LEASE_SECONDS + 1, "c")
    await go_back(replica)
    await report(replica, "a", held, clock.time + LEASE_SECONDS)
    client = backend.client()
    for node in {*"ab"} - {*registers}:
        await client.zrem(keys.LEASES, keys.life(node, "1"))
        await client.delete(keys.node(node))
    await client.aclose()
    seconds = LEASE_SECONDS + WANTED_SECONDS + LOOK_AGAIN_SECONDS + SOON
    assert await init(replica, clock, 2 * seconds, max_world)
    assert await is_open_for(replica, "c")


async def test_a_store_that_has_lost_something_gives_all_nodes_a_lease_to_register() -> None:
    """The leases that it has may be those of an old snapshot."""
    grace = Grace(5.0)
    assert [grace.allows_eviction(now, 1) for now in (0.0, 2.0, 4.0, 6.0)] == [*[False] * 3, True]
    assert [grace.allows_eviction(now, 2) for now in (8.0, 10.0, 12.0)] == [False] * 3
    assert grace.allows_eviction(14.0, 2)


async def test_nodes_can_register_where_a_rank_has_asked_for_a_seat_since_the_store_lost_all(
    replica: Replica, clock: ManualClock, backend: Backend
) -> None:
    held = await open_group(replica, max_world=4)
    client = backend.client()
    await client.flushall()  # type: ignore[attr-defined]
    await client.aclose()
    await replica.register("c")
    assert (await replica.join(0, "c", of=2, max_world=4, session="new")).ready is False
    for node in "ab":
        await replica.register(node)
        await report(replica, node, held, clock.now() + SOON)
    assert (await record_of(replica)).term == held.term
    seats = await replica.store.nodes.groups_of("c", "1")
    assert seats == [], "its seat is free: it asks again, and joins the group that runs"
