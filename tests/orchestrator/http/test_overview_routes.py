"""The overview over HTTP: once, as a stream, with the token, and when there is none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator.http.dashboard import FOLDER, assets
from allfold_orchestrator.http.overview_routes import Overview
from allfold_orchestrator.observation import watch
from allfold_orchestrator.observation.agents import AgentAnswer, Agents
from allfold_orchestrator.settings import Settings
from tests.orchestrator.api_client import ApiClient, body_of, error_of, form, serving
from tests.orchestrator.fake_agent import FakeAgent, replica
from tests.orchestrator.observations import status_of
from tests.support.waiting import DEADLINE_SECONDS, PAUSE_SECONDS

pytestmark = pytest.mark.anyio


class Asked:
    """Agents that all answer at once; counts how often."""

    def __init__(self) -> None:
        self.times = 0

    async def ask(self, _: Agents, urls: dict[str, str], since: Any) -> dict[str, AgentAnswer]:
        self.times += 1
        return {node: AgentAnswer(status_of(node, "train", [node])) for node in urls}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    answers = Asked()

    async def ask(client: Agents, urls: dict[str, str], since: Any) -> dict[str, AgentAnswer]:
        return await answers.ask(client, urls, since)

    async def ask_flights(*_: Any) -> None: ...

    monkeypatch.setattr(Agents, "ask", ask)
    monkeypatch.setattr(Agents, "ask_flights", ask_flights)
    return answers


async def test_it_shows_nodes_groups_and_what_is_wrong(api: ApiClient, asked: Asked) -> None:
    await form(api)
    shown = body_of(await api.http.get("/v1/overview"))
    assert [node["node"] for node in shown["nodes"]] == ["a", "b"]
    assert [group["name"] for group in shown["groups"]] == ["train"]
    assert shown["headline"]["text"] == "1 group runs on 2 nodes. All is well."


async def test_it_has_the_form_of_its_document(api: ApiClient, asked: Asked) -> None:
    await form(api)
    answer = (await api.http.get("/v1/overview")).json()
    assert answer.keys() == Overview.model_json_schema()["properties"].keys()
    Overview.model_validate(answer)


async def test_however_many_ask_the_agents_are_asked_once(api: ApiClient, asked: Asked) -> None:
    await form(api)
    answers = await asyncio.gather(*(api.http.get("/v1/overview") for _ in range(20)))
    assert {each.status_code for each in answers} == {200}
    assert asked.times == 1


async def test_nobody_is_asked_while_nobody_watches(api: ApiClient, asked: Asked) -> None:
    await form(api)
    await api.http.get("/v1/nodes")
    assert asked.times == 0


@pytest.mark.parametrize("since", ["-1", "nan", "x"])
async def test_a_since_that_is_no_time_is_refused(api: ApiClient, since: str) -> None:
    error_of(await api.http.get(f"/v1/overview?since={since}"), 400, "AF101")
    error_of(await api.http.get(f"/v1/overview/events?since={since}"), 400, "AF101")


async def test_a_store_that_fails_is_an_error_and_not_an_empty_picture(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ServiceError("the state store does not answer")

    monkeypatch.setattr(api.app.state.orchestrator, "nodes", fail)
    response = await api.http.get("/v1/overview")
    assert response.status_code == 503
    assert "the state store does not answer" in response.json()["error"]["message"]


async def events_of(http: httpx.AsyncClient, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the first events of the stream."""
    found: list[tuple[str, dict[str, Any]]] = []
    name = ""
    async with http.stream("GET", "/v1/overview/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
                if len(found) == count:
                    break
    return found


async def test_events_bring_the_picture_again_and_again(
    make_store: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.01)
    async with replica(make_store()) as served:
        found = await events_of(served.http, 3)
    assert [name for name, _ in found] == ["overview"] * 3
    assert found[0][1]["headline"]["text"] == "No node has registered yet."


async def test_events_tell_what_is_wrong_with_the_store_and_go_on(
    make_store: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PERIOD_SECONDS", 0.01)

    async def fail(*_: Any) -> None:
        raise ServiceError("the state store does not answer")

    async with replica(make_store()) as served:
        monkeypatch.setattr(served.links._orchestrator, "nodes", fail)
        found = await events_of(served.http, 2)
    assert [name for name, _ in found] == ["problem"] * 2
    assert found[0][1]["error"]["message"] == "the state store does not answer"


async def test_each_replica_shows_what_another_has_written(make_store: Any, asked: Asked) -> None:
    async with (
        replica(make_store()) as one,
        replica(make_store()) as other,
        FakeAgent("a", one) as agent,
    ):
        await agent.register()
        shown = body_of(await other.http.get("/v1/overview"))
    assert [node["node"] for node in shown["nodes"]] == ["a"]


async def test_a_page_that_is_closed_leaves_its_place(
    make_store: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS", 1)
    async with replica(make_store()) as served:
        await events_of(served.http, 1)

        async def refused() -> bool:
            async with served.http.stream("GET", "/v1/overview/events") as response:
                return response.status_code == 503

        async with asyncio.timeout(DEADLINE_SECONDS):
            while await refused():
                await asyncio.sleep(PAUSE_SECONDS)


async def test_so_many_may_watch_and_the_next_one_is_told(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS", 0)
    response = await api.http.get("/v1/overview/events")
    assert response.status_code == 503
    assert "pages watch this orchestrator already" in response.json()["error"]["message"]


async def test_data_needs_the_token_and_the_page_does_not() -> None:
    async with serving(Settings(lease_seconds=60, token="secret")) as api:
        for path in ("/v1/overview", "/v1/overview/events"):
            assert (await api.http.get(path)).status_code == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert (await api.http.get(path, headers=wrong)).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert (await api.http.get("/v1/overview", headers=right)).status_code == 200
        assert (await api.http.get("/")).status_code == 200
        assert (await api.http.get("/dashboard/app.js")).status_code == 200


async def test_the_page_allows_nothing_from_elsewhere_and_nothing_inline(api: ApiClient) -> None:
    page = await api.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert "http" not in page.text


async def test_a_file_that_is_known_is_not_sent_again(api: ApiClient) -> None:
    first = await api.http.get("/dashboard/style.css")
    again = await api.http.get(
        "/dashboard/style.css", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["..%2Fbodies.py", "bodies.py", "%2e%2e", "nothing.js"])
async def test_only_the_dashboards_files_are_served(api: ApiClient, name: str) -> None:
    assert (await api.http.get(f"/dashboard/{name}")).status_code == 404


def test_every_file_of_the_folder_is_served() -> None:
    assert set(assets()) == {path.name for path in FOLDER.iterdir()}
