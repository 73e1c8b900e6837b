"""The short way and the routes that document it are one interface: same answers, same refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fastapi import APIRouter
from pydantic import SecretStr
from starlette.routing import Router

from allfold_orchestrator.fast_lane import FastLane
from allfold_orchestrator.gates import MAX_BODY_BYTES
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.settings import Settings
from tests.orchestrator.api_client import ApiClient, serving

pytestmark = pytest.mark.anyio

NODE = {
    "node": "a",
    "incarnation": "1",
    "control_url": "http://a:1",
    "data_address": "a:2",
}
LINK = {"latency": 1e-4, "bandwidth": 1e9}
JOIN = {
    "node": "a",
    "incarnation": "1",
    "rank": 0,
    "session": "s0",
    "world_size": 2,
    "timeout": 30.0,
}
BEAT = {"incarnation": "1", "progress": []}
PLAN = "/v1/groups/train/plan"
RANKS = "/v1/groups/train/ranks"

# In this order; each on an orchestrator that has seen those before it.
GOOD: list[tuple[str, str, Any]] = [
    ("POST", "/v1/nodes", NODE),
    ("POST", "/v1/nodes/a/heartbeat", BEAT),
    ("POST", "/v1/nodes", {**NODE, "node": "c", "data_address": "c:2", "link": LINK}),
    ("POST", RANKS, JOIN),
    ("POST", RANKS, JOIN),
    ("GET", f"{PLAN}?epoch=1&session=s0&wait=0.01", None),
    ("GET", f"{PLAN}?epoch=1&session=s0", None),
    ("POST", RANKS, {**JOIN, "rank": 1, "session": "s1"}),
    ("GET", f"{PLAN}?session=s1&epoch=1&wait=30", None),
    ("DELETE", f"{RANKS}/0?session=s0", None),
    ("DELETE", f"{RANKS}/1?session=s1&reason=lost", None),
]
REFUSED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/nodes", {**NODE, "incarnation": "2", "data_address": "b:2"}),
    ("POST", "/v1/nodes/b/heartbeat", BEAT),
    ("POST", RANKS, {**JOIN, "node": "b"}),
    ("POST", RANKS, {**JOIN, "session": "other"}),
    ("POST", RANKS, {**JOIN, "rank": 1, "timeout": 1.0}),
    ("POST", RANKS, {**JOIN, "rank": 1, "strategies": {"all_reduce": "nonsense"}}),
    ("GET", f"{PLAN}?epoch=1&session=nobody", None),
    ("DELETE", f"{RANKS}/0?session=nobody", None),
]
NOT_WELL_FORMED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/nodes", {**NODE, "node": "no name"}),
    ("POST", "/v1/nodes", {**NODE, "link": {**LINK, "bandwidth": 0}}),
    ("POST", "/v1/nodes", b"{"),
    ("POST", "/v1/nodes", b""),
    ("POST", "/v1/nodes/a%2Fb/heartbeat", BEAT),
    ("POST", "/v1/nodes/a%0A/heartbeat", BEAT),
    ("POST", "/v1/nodes/a/heartbeat", {**BEAT, "more": 1}),
    ("POST", RANKS, {**JOIN, "rank": "0"}),
    ("GET", PLAN, None),
    ("GET", f"{PLAN}?epoch=-1&session=s0", None),
    ("GET", f"{PLAN}?epoch=1&session=", None),
    ("GET", f"{PLAN}?epoch=1&session=s0&wait=30.5", None),
    ("GET", f"{PLAN}?epoch=1&session=s0&wait=nan", None),
    ("DELETE", f"{RANKS}/0", None),
    ("DELETE", f"{RANKS}/x?session=s0", None),
    ("DELETE", f"{RANKS}/100000?session=s0", None),
    ("DELETE", f"{RANKS}/0?session=s0&reason=boredom", None),
    ("PUT", RANKS, JOIN),
]


Seen = tuple[int, bytes, dict[str, str]]


async def send(api: ApiClient, method: str, path: str, body: Any) -> Seen:
    if isinstance(body, bytes):
        headers = {"content-type": "application/json"}
        response = await api.http.request(method, path, content=body, headers=headers)
    else:
        response = await api.http.request(method, path, json=body)
    return response.status_code, response.content, dict(response.headers)


async def answers(requests: Sequence[tuple[str, str, Any]]) -> list[Seen]:
    """What a new orchestrator answers to these, one after the other."""
    async with serving() as api:
        return [await send(api, *request) for request in requests]


async def by_the_routes(
    requests: Sequence[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> list[Seen]:
    with monkeypatch.context() as patch:
        patch.setattr(FastLane, "_handler", lambda *_: None)
        return await answers(requests)


@pytest.mark.parametrize("requests", [GOOD, GOOD[:4] + REFUSED], ids=["good", "refused"])
async def test_the_answers_are_those_of_the_routes_byte_for_byte(
    requests: list[tuple[str, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await by_the_routes(requests, monkeypatch)
    assert await answers(requests) == expected
    statuses = [status for status, _, _ in expected]
    assert all(status == 200 for status in statuses[:4])
    assert all((status == 200) is (requests is GOOD) for status in statuses[4:])


async def test_good_requests_and_refusals_do_not_take_the_long_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as api:
        await api.http.get("/healthz")
        monkeypatch.setattr(APIRouter, "__call__", _no_way)
        monkeypatch.setattr(Router, "__call__", _no_way)
        for request in GOOD[:4] + REFUSED[:1] + GOOD[4:]:
            assert (await send(api, *request))[0] in (200, 409), request


async def _no_way(*_: object) -> None:
    raise AssertionError("this request went to the routes")


@pytest.mark.parametrize("request_", NOT_WELL_FORMED, ids=lambda request: str(request)[:60])
async def test_what_is_not_well_formed_is_refused_by_the_routes(
    request_: tuple[str, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*GOOD[:3], request_]
    expected = await by_the_routes(requests, monkeypatch)
    assert await answers(requests) == expected
    assert expected[-1][0] in (400, 404, 405, 422)


async def test_a_body_in_many_pieces_is_read_whole() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for byte in json.dumps(JOIN).encode():
            yield bytes([byte])

    async with serving() as api:
        await send(api, *GOOD[0])
        headers = {"content-type": "application/json"}
        joined = await api.http.post(RANKS, content=pieces(), headers=headers)
        assert joined.json() == {"epoch": 1, "ready": False}


async def test_a_body_over_the_limit_is_refused_here_too() -> None:
    async with serving() as api:
        huge = json.dumps({**JOIN, "session": "s" * MAX_BODY_BYTES}).encode()

        async def unannounced() -> AsyncIterator[bytes]:
            yield huge

        headers = {"content-type": "application/json"}
        for content in (huge, unannounced()):
            assert (await api.http.post(RANKS, content=content, headers=headers)).status_code == 413


async def test_nobody_passes_without_the_token() -> None:
    async with serving(Settings(lease_seconds=60, token=SecretStr("secret"))) as api:
        for request in GOOD:
            assert (await send(api, *request))[0] == 401
        api.http.headers["authorization"] = "Bearer secret"
        assert (await send(api, *GOOD[0]))[0] == 200


async def test_a_mistake_of_ours_is_answered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    async with serving() as api:
        monkeypatch.setattr(Orchestrator, "heartbeat", broken)
        status, body, _ = await send(api, *GOOD[1])
        assert status == 500
        assert "failed on POST" in json.loads(body)["error"]["message"]
