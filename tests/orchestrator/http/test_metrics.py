"""The metrics of the orchestrator, over HTTP; those of its store come and go with it."""

from __future__ import annotations

from time import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from allfold_orchestrator.store.node_store import NodeStore
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from tests.orchestrator.api_client import ApiClient, serving

pytestmark = pytest.mark.anyio

PREFIX = "allfold_orchestrator_"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def look(api: ApiClient) -> Series:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def one(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset(labels.items())))


async def test_nodes_groups_and_missing_ranks_are_counted(api: ApiClient) -> None:
    await api.register("a")
    await api.register("b")
    await api.join(0, node="a")
    found = await look(api)
    assert one(found, "nodes", state="alive") == 2
    assert one(found, "groups", phase="forming") == 1
    assert one(found, "ranks_missing") == 1
    assert one(found, "node_heartbeat_age_seconds", node="a") is not None
    assert one(found, "store_up") is not None
    assert (one(found, "store_seconds_count") or 0) > 0
    await api.join(1, node="b")
    found = await look(api)
    assert one(found, "groups", phase="ready") == 1
    assert one(found, "ranks_missing") == 0


async def test_ends_of_nodes_are_counted_by_their_reason(api: ApiClient) -> None:
    await api.register("a", incarnation="1")
    await api.register("a", incarnation="2")
    await api.http.delete("/v1/nodes/a", params={"incarnation": "2"})
    nodes: NodeStore = api.store.nodes
    await api.register("b")
    assert await nodes.evict("b", "1", "was stuck")
    assert not await nodes.evict("b", "1", "was stuck")
    found = await look(api)
    assert one(found, "nodes_ended_total", reason="restarted") == 1
    assert one(found, "nodes_ended_total", reason="signed_off") == 1
    assert one(found, "nodes_ended_total", reason="evicted") == 1
    assert one(found, "nodes_ended_total", reason="lease_ended") == 0
    assert one(found, "nodes", state="gone") == 2
    assert one(found, "node_heartbeat_age_seconds", node="a") is None


async def test_requests_are_counted_by_their_route_not_by_what_they_name(api: ApiClient) -> None:
    for group in ("one", "two"):
        await api.http.get(f"/v1/groups/{group}")
    await api.http.get("/nowhere/1")
    await api.http.request("BREW", "/nowhere/2")
    found = await look(api)
    assert one(found, "requests_total", method="GET", route="/v1/groups/{group}", status="404") == 2
    assert one(found, "requests_total", method="GET", route="other", status="404") == 1
    assert one(found, "requests_total", method="other", route="other", status="404") == 1
    assert one(found, "request_seconds_count", route="/v1/groups/{group}") == 2


async def test_an_incident_is_counted_once_however_often_it_is_repeated(api: ApiClient) -> None:
    log = api.app.state.orchestrator.incidents
    incident = {"id": "a-1", "cause": "late_rank", "effect": "hang", "seen": time(), "ended": None}
    await log.report(incident)
    await log.report(incident)
    found = await look(api)
    assert one(found, "incidents", cause="late_rank", effect="hang") == 1
    assert one(found, "incidents_total", cause="late_rank") == 1
    await log.report({**incident, "ended": time()})
    found = await look(api)
    assert one(found, "incidents", cause="late_rank", effect="hang") == 0
    assert one(found, "incidents_total", cause="late_rank") == 1


async def test_without_its_store_the_orchestrator_serves_the_rest() -> None:
    nobody = Store(connect("redis://127.0.0.1:1/0"), 5.0)
    async with serving(store=nobody) as api:
        found = await look(api)
    assert one(found, "store_up") == 0
    assert (one(found, "store_failures_total") or 0) > 0
    assert one(found, "control_links") == 0
    assert one(found, "nodes", state="alive") is None


async def test_prometheus_is_told_of_the_agents(api: ApiClient) -> None:
    await api.register("a")
    await api.register("b")
    await api.http.delete("/v1/nodes/b", params={"incarnation": "1"})
    answer = await api.http.get("/v1/metrics/targets")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [{"targets": ["a:7401"], "labels": {"node": "a", "token": ""}}]
