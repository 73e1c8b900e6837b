"""Incidents: kept for people, on every replica, and honest about what is not repeated any more."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from allfold_cluster.redis_server import RedisServer
from allfold_core.errors import ServiceError
from allfold_core.incident import LOST_SECONDS, Cause, Effect, Incident, rank_culprit
from allfold_orchestrator.incidents import IncidentLog
from allfold_orchestrator.store import life
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from tests.orchestrator.api_client import ApiClient, serving
from tests.orchestrator.conftest import MakeStore, ManualClock
from tests.orchestrator.fake_agent import Replica, agents, replica
from tests.support.require import requires
from tests.support.waiting import until, until_found

pytestmark = pytest.mark.anyio
Json = dict[str, Any]


def late(
    number: int, seen: float = 1000.0, ended: float | None = None, reporter: str = "b"
) -> Json:
    return Incident(
        f"b-{number}",
        Cause.LATE_RANK,
        Effect.HANG,
        rank_culprit(3, "b"),
        f"op {number} waits for rank 3 on node b",
        "train",
        1,
        number,
        began=seen - 1,
        seen=seen,
        ended=ended,
        reporter=reporter,
        evidence={"process": "is in load"},
    ).to_dict()


async def test_replicas_see_open_incidents_first_and_the_newest_of_each_first(
    make_store: MakeStore, clock: ManualClock
) -> None:
    one, other = make_store(clock), make_store(clock)
    for number, ended in ((1, None), (2, 1003.0), (3, None), (4, 1005.0)):
        await one.incidents.keep(late(number, 1000.0 + number, ended))
    found = await other.incidents.latest(10)
    assert [each["seq"] for each in found] == [3, 1, 4, 2]
    assert found[0] == late(3, 1003.0)
    assert [each["seq"] for each in await other.incidents.latest(1)] == [3]


async def test_what_is_said_again_replaces_what_was_said_before(store: Store) -> None:
    await store.incidents.keep(late(1))
    await store.incidents.keep(late(1) | {"sentence": "it is stopped", "ended": 1004.0})
    (found,) = await store.incidents.latest(10)
    assert (found["sentence"], found["ended"]) == ("it is stopped", 1004.0)


async def test_an_incident_that_nobody_repeats_ended_when_it_was_heard_last(
    store: Store, clock: ManualClock
) -> None:
    await store.incidents.keep(late(1))
    clock.time += LOST_SECONDS
    assert (await store.incidents.latest(1))[0]["ended"] is None
    clock.time += 1.0
    assert (await store.incidents.latest(1))[0]["ended"] == 1000.0


async def test_the_oldest_go_where_there_are_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "MAX_INCIDENTS", 2)
    for number in range(4):
        await store.incidents.keep(late(number, 1000.0 + number))
    await store.retention.apply(2000.0)
    assert [each["seq"] for each in await store.incidents.latest(10)] == [3, 2]
    await store.retention.apply(1003.0 + life.INCIDENT_SECONDS)
    assert [each["seq"] for each in await store.incidents.latest(10)] == [3]


async def test_the_api_shows_what_an_agent_has_said_on_its_link(make_store: MakeStore) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(make_store()))
        (agent,) = await agents(stack, served, "a")
        await agent.send("incident", incident=late(1, reporter="a"))

        found = await until_found(partial(shown, served), "the incident is known")
        assert found == [late(1, reporter="a")]


async def test_the_incidents_of_a_node_end_when_it_signs_off(make_store: MakeStore) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(make_store()))
        for agent, number in zip(await agents(stack, served, "ac"), (1, 2), strict=True):
            await agent.send("incident", incident=late(number, reporter=agent.name))
        await until_found(partial(shown_of, served, 2), "both incidents are known")
        query = {"incarnation": "1"}
        (await served.http.delete("/v1/nodes/a", params=query)).raise_for_status()
        ended = {each["reporter"]: each["ended"] for each in await shown(served)}
        assert ended == {"a": 1000.0, "c": None}


async def shown_of(served: Replica, count: int) -> list[Json]:
    """Return what the API shows, once that is so many."""
    found = await shown(served)
    return found if len(found) == count else []


async def shown(served: Replica) -> list[Json]:
    """Return what the API shows."""
    answer = (await served.http.get("/v1/incidents")).raise_for_status().json()
    found: list[Json] = answer["incidents"]
    return found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cause", "bad_luck"),
        ("sentence", "x" * 5000),
        ("evidence", {"a": [1]}),
        ("seen", -1.0),
        ("reporter", "b"),
    ],
)
async def test_nonsense_ends_the_link_and_is_not_kept(
    make_store: MakeStore, field: str, value: object
) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(replica(make_store()))
        (agent,) = await agents(stack, served, "a")
        await agent.send("incident", incident=late(1, reporter="a") | {field: value})
        await agent.closed()
        assert (await served.http.get("/v1/incidents")).json()["incidents"] == []


async def test_a_limit_that_cannot_be_is_refused() -> None:
    async with serving() as api:
        client: ApiClient = api
        answer = await client.http.get("/v1/incidents?limit=0")
        assert answer.status_code == 400


@pytest.mark.redis
async def test_a_store_that_takes_no_writes_is_an_incident_until_it_does(tmp_path: Path) -> None:
    requires("redis")
    redis = RedisServer(tmp_path)
    redis.start()
    administrator: Any = Redis.from_url(redis.url)
    try:
        async with AsyncExitStack() as stack:
            store = Store(connect(redis.url), 2.0)
            served = await stack.enter_async_context(replica(store, lease_seconds=2.0))

            async def are_over() -> list[Json]:
                return [each for each in await shown(served) if each["ended"] is not None]

            await until(lambda: served.sweeper.problem is None, "leases are watched")
            await administrator.config_set("maxmemory-policy", "noeviction")
            await administrator.config_set("maxmemory", "1")
            (found,) = await until_found(partial(shown, served), "the outage is an incident")
            assert found["ended"] is None
            assert (found["cause"], found["culprit"]["kind"]) == ("store_failed", "store")
            assert "cannot write to its state store" in found["sentence"]
            await administrator.config_set("maxmemory", "0")
            (over,) = await until_found(are_over, "the incident is over, and kept")
            assert over["id"] == found["id"]
    finally:
        await administrator.aclose()
        redis.stop()


async def test_an_outage_is_shown_by_this_replica_also_where_the_store_answers_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ServiceError("the orchestrator cannot reach its state store")

    known = IncidentLog(store.incidents)
    monkeypatch.setattr(store.incidents, "latest", lost)
    monkeypatch.setattr(store.incidents, "keep", lost)
    with pytest.raises(ServiceError):
        await known.latest(10)
    known.store_failed("Redis is away")
    known.store_failed("Redis is still away")
    await known.report(late(1))  # is lost, as the agent repeats what lasts
    (found,) = await known.latest(10)
    assert (found["sentence"], found["ended"]) == ("Redis is away", None)
    monkeypatch.undo()
    await known.store_works()
    await known.store_works()
    (found,) = await known.latest(10)
    assert found["ended"] is not None


async def test_an_outage_is_kept_until_the_store_has_taken_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> None:
        raise ServiceError("the orchestrator cannot write to its state store")

    known = IncidentLog(store.incidents)
    known.store_failed("Redis is away")
    monkeypatch.setattr(store.incidents, "keep", lost)
    await known.store_works()
    assert await known.latest(10) == []
    monkeypatch.undo()
    await known.store_works()
    (found,) = await known.latest(10)
    assert (found["sentence"], found["ended"] is None) == ("Redis is away", False)
