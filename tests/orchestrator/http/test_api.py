"""Probes, the token, the OpenAPI document, and the link model of plans, over HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest

from allfold_core.topology import LinkModel
from allfold_orchestrator.http.app import OPEN_PATHS
from allfold_orchestrator.settings import Settings
from tests.orchestrator.api_client import ApiClient, body_of, error_of, serving
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio


@pytest.fixture
async def guarded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    monkeypatch.setenv("ALLFOLD_TOKEN", "sesame")
    async with serving() as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", "tökén".encode(), b"Basic x"]
)
@pytest.mark.parametrize("path", ["/v1/nodes", "/metrics", "/openapi.json", "/nowhere"])
async def test_nobody_comes_in_without_the_token(
    guarded: ApiClient, header: bytes | None, path: str
) -> None:
    headers = {} if header is None else {b"authorization": header}
    response = await guarded.http.get(path, headers=headers)
    error = error_of(response, 401, "AF100")
    assert "ALLFOLD_TOKEN" in error["message"]
    assert "sesame" not in response.text
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer "])
async def test_the_token_opens_everything(guarded: ApiClient, scheme: bytes) -> None:
    headers = {b"authorization": scheme + b"sesame"}
    assert (await guarded.http.get("/v1/nodes", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/version"])
async def test_probes_need_no_token(guarded: ApiClient, path: str) -> None:
    await until(lambda: guarded.app.state.sweeper.problem is None, "it is ready")
    assert (await guarded.http.get(path)).status_code == 200


async def test_facts_have_the_clock_and_say_whether_a_token_is_asked_for(
    api: ApiClient, guarded: ApiClient
) -> None:
    before = time.time()
    facts = (await api.http.get("/v1/facts")).json()
    assert before <= facts["now"] <= time.time()
    assert (facts["service"], facts["needs_token"]) == ("allfold-orchestrator", False)
    assert (await guarded.http.get("/v1/facts")).status_code == 401
    headers = {b"authorization": b"Bearer sesame"}
    answer = await guarded.http.get("/v1/facts", headers=headers)
    assert answer.json()["needs_token"] is True


async def test_probes_answer(api: ApiClient) -> None:
    assert body_of(await api.http.get("/healthz")) == {"status": "ok"}
    assert (await api.http.get("/version")).json()["service"] == "allfold-orchestrator"
    await until(lambda: api.app.state.sweeper.problem is None, "the first sweep")
    ready = (await api.http.get("/readyz")).json()
    assert ready["ready"] is True
    assert {check["name"]: check["ok"] for check in ready["checks"]} == {
        "store": True,
        "sweeper": True,
    }
    assert all(check["reason"] for check in ready["checks"])


async def test_readiness_says_what_is_wrong(api: ApiClient) -> None:
    await until(lambda: api.app.state.sweeper.problem is None, "the first sweep")
    api.app.state.sweeper.problem = "the sun is down"
    response = await api.http.get("/readyz")
    assert response.status_code == 503
    checks = {check["name"]: check for check in response.json()["checks"]}
    assert checks["sweeper"] == {"name": "sweeper", "ok": False, "reason": "the sun is down"}
    assert checks["store"]["ok"] is True


async def test_readiness_shows_no_raw_errors_to_those_without_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLFOLD_REDIS_URL", "redis://secret-host.invalid:6379/0")
    async with serving() as api:
        sweeper = api.app.state.sweeper
        await until(lambda: "store" in (sweeper.problem or ""), "the sweeper notices")
        response = await api.http.get("/readyz")
    assert response.status_code == 503
    for check in response.json()["checks"]:
        assert not check["ok"]
        assert re.search("state store (does|did) not answer", check["reason"])
    assert "secret-host" not in response.text
    assert "Error" not in response.text


@pytest.mark.parametrize("token", ["", "sesame"])
async def test_the_document_names_the_security_scheme_of_every_route(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("ALLFOLD_TOKEN", token)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with serving() as api:
        schema = (await api.http.get("/openapi.json", headers=headers)).json()
    schemes = schema.get("components", {}).get("securitySchemes", {})
    assert {scheme["scheme"] for scheme in schemes.values()} == ({"bearer"} if token else set())
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            guarded = bool(token) and path not in OPEN_PATHS
            assert operation.get("security", []) == ([{"token": []}] if guarded else []), (
                method,
                path,
            )


async def test_everything_is_documented(api: ApiClient) -> None:
    schema = (await api.http.get("/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert operation["description"], (method, path)
            (content,) = operation["responses"]["200"]["content"].values()
            assert content["schema"], (method, path)
            if path.startswith("/v1"):
                assert {"400", "503", "default"} <= operation["responses"].keys(), (method, path)
                assert "422" not in operation["responses"], (method, path)


async def test_the_link_model_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLFOLD_LINK_LATENCY", "0.25")
    monkeypatch.setenv("ALLFOLD_LINK_BANDWIDTH", "1000")
    async with serving(Settings(lease_seconds=60)) as api:
        await api.register("a")
        await api.join(0, world_size=1)
        links = (await api.plan("s0")).json()["plan"]["links"]
    assert (links["latency"], links["seconds_per_byte"]) == (0.25, 0.001)


async def test_link_settings_that_equal_the_defaults_win_over_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALLFOLD_LINK_LATENCY", "0.00015")
    monkeypatch.setenv("ALLFOLD_LINK_BANDWIDTH", "1.1e+09")
    async with serving(Settings(lease_seconds=60)) as api:
        await api.register("a", link={"latency": 900e-6, "bandwidth": 125e6})
        await api.join(0, world_size=1)
        links = (await api.plan("s0")).json()["plan"]["links"]
    assert LinkModel(**links) == LinkModel()


async def test_a_plan_reckons_with_the_link_that_a_node_measured_after_it_had_registered(
    api: ApiClient,
) -> None:
    await api.register("a")
    await api.register("b")
    await api.register("b", link={"latency": 900e-6, "bandwidth": 125e6})
    await api.join(0, "a")
    await api.join(1, "b")
    links = (await api.plan("s0")).json()["plan"]["links"]
    assert (links["latency"], links["seconds_per_byte"]) == (2.0**-10, 2.0**-27)


async def test_an_application_that_ends_lets_go_of_those_who_wait() -> None:
    async with serving() as api:
        await api.register("a")
        await api.join(0)
        waiting = asyncio.create_task(api.plan("s0", wait=30))
        await until(lambda: api.store.notifications._waiting, "the long-poll waits")
        api.store.notifications.stop()
        assert (await within(5, waiting)).json()["ready"] is False
