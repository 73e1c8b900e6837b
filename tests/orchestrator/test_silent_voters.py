"""Nodes with a vote that fall silent: they stay, unless nobody of their groups is heard."""

from __future__ import annotations

import pytest

from allfold_core.survival.term_record import Life
from allfold_orchestrator import sweeper
from allfold_orchestrator.membership.group_state import (
    AgentRegisters,
    Leave,
    Reason,
)
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.store import keys
from allfold_orchestrator.sweeper import (
    ABANDONED_SECONDS,
    LOOK_AGAIN_SECONDS,
    WANTED_SECONDS,
    Sweeper,
)
from tests.orchestrator.builders import GROUP
from tests.orchestrator.conftest import LEASE_SECONDS, Backend, MakeStore, ManualClock
from tests.orchestrator.sweeping import Replica, run_for

pytestmark = pytest.mark.anyio


@pytest.fixture
def replica(make_store: MakeStore, clock: ManualClock) -> Replica:
    return Replica(make_store(clock))


async def test_a_silent_node_with_a_vote_in_a_group_stays_and_is_looked_for_now_and_then(
    replica: Replica, clock: ManualClock
) -> None:
    looked_for: list[Life] = []

    async def look(life: Life) -> None:
        looked_for.append(life)

    replica.sweeper = Sweeper(replica.store, replica.service, look)
    for rank, node in enumerate("ab"):
        await replica.register(node)
        await replica.join(rank, node)
    assert await run_for(replica, clock, LEASE_SECONDS + 2.5 * LOOK_AGAIN_SECONDS, "a") == []
    assert looked_for == [("b", "1")] * 3
    assert (await replica.service.group(GROUP)).phase == "ready"
    await replica.service.leave(GROUP, Leave(0, "s0", Reason.FINISHED))
    await replica.service.leave(GROUP, Leave(1, "s1", Reason.FINISHED))
    assert await run_for(replica, clock, LOOK_AGAIN_SECONDS, "a") == ["b"], "the group is over"


@pytest.mark.parametrize("reporting", ["a", "ac"])
async def test_it_is_said_what_to_do_where_too_few_have_reported_to_evict_a_silent_node(
    replica: Replica, clock: ManualClock, caplog: pytest.LogCaptureFixture, reporting: str
) -> None:
    nodes = "ab" if reporting == "a" else "abc"
    for rank, node in enumerate(nodes):
        await replica.register(node)
        await replica.join(rank, node, of=len(nodes))
    store = replica.store
    state = await store.groups.read_if_possible(GROUP)
    record = term_record(state) if state else None
    assert record
    later = await store.lives.outgrow(record.generation)
    for node in reporting:
        until = clock.time + LEASE_SECONDS
        event = AgentRegisters((node, "1"), record.generation, record, later, until)
        await store.groups.submit(GROUP, event)
    await run_for(replica, clock, LEASE_SECONDS + 2.5 * LOOK_AGAIN_SECONDS, *reporting)
    said = [each for each in caplog.messages if "DELETE /v1/nodes/b?force=true" in each]
    assert len(said) == (reporting == "a"), "the others are enough: the failure detector evicts it"


async def test_a_silent_node_in_a_group_that_cannot_be_read_may_have_a_vote_and_stays(
    replica: Replica, clock: ManualClock, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    for rank, node in enumerate("ab"):
        await replica.register(node)
        await replica.join(rank, node)
    client = backend.client()
    await client.hset(keys.group(GROUP), mapping={"version": "x", "meta": "{"})
    await client.aclose()
    assert await run_for(replica, clock, LEASE_SECONDS + 2 * LOOK_AGAIN_SECONDS, "a") == []
    assert len([m for m in caplog.messages if "it is damaged" in m]) == 1


async def test_a_group_of_which_nobody_is_heard_frees_its_name_when_another_one_wants_it(
    replica: Replica, clock: ManualClock
) -> None:
    for node in "abc":
        await replica.register(node)
    await replica.join(0, "a")
    await replica.join(1, "b")
    assert await run_for(replica, clock, 2 * WANTED_SECONDS, "c") == [], "nobody wants the name"
    await replica.service.leave(GROUP, Leave(0, "s0", Reason.LOST))
    await replica.join(0, "c", of=1)
    assert sorted(await run_for(replica, clock, LOOK_AGAIN_SECONDS, "c")) == ["a", "b"]
    view = await replica.service.group(GROUP)
    assert (view.phase, view.epoch) == ("ready", 2)
    assert [place.node for place in view.present] == ["c"]


async def test_a_silent_node_keeps_the_name_of_a_group_as_long_as_another_one_beats(
    replica: Replica, clock: ManualClock
) -> None:
    for node in "abc":
        await replica.register(node)
    await replica.join(0, "a")
    await replica.join(1, "b")
    await replica.service.leave(GROUP, Leave(0, "s0", Reason.FINISHED))
    await replica.join(0, "c", of=1)
    assert await run_for(replica, clock, 2 * WANTED_SECONDS, "a", "c") == []


async def test_a_group_of_which_nobody_is_heard_for_a_day_is_over(
    replica: Replica, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "ABANDONED_SECONDS", 30)
    for rank, node in enumerate("ab"):
        await replica.register(node)
        await replica.join(rank, node)
    ended = await run_for(replica, clock, LEASE_SECONDS + 30 + 2 * LOOK_AGAIN_SECONDS)
    assert sorted(ended) == ["a", "b"]
    assert (await replica.groups())[0].phase == "gone"


async def test_nobody_is_abandoned_for_the_time_in_which_the_orchestrator_was_away(
    make_store: MakeStore, clock: ManualClock
) -> None:
    before = Replica(make_store(clock))
    for rank, node in enumerate("ab"):
        await before.register(node)
        await before.join(rank, node)
    clock.time += 2 * ABANDONED_SECONDS
    after = Replica(make_store(clock))
    assert await run_for(after, clock, LEASE_SECONDS + WANTED_SECONDS) == []
