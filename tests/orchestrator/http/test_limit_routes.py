"""The routes of the caps: set, replaced, removed and listed, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from allfold_core.protocol.traffic import Cap
from allfold_orchestrator.store import keys, limits
from tests.orchestrator.api_client import ApiClient, body_of, error_of, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    monkeypatch.setenv("ALLFOLD_TOKEN", "join")
    monkeypatch.setenv("ALLFOLD_ADMIN_TOKEN", "admin")
    async with serving() as client:
        client.http.headers["authorization"] = "Bearer admin"
        yield client


async def put(api: ApiClient, **body: Any) -> Any:
    return await api.http.put("/v1/limits", json=body)


async def texts(api: ApiClient) -> list[str]:
    return [each["text"] for each in body_of(await api.http.get("/v1/limits"))["limits"]]


async def test_caps_are_set_replaced_removed_and_listed(api: ApiClient) -> None:
    assert await texts(api) == []
    assert body_of(await put(api, rate="200Mbit"))["limits"] == [
        {
            "node": "",
            "group": "",
            "zones": [],
            "rate": 25_000_000,
            "text": "each agent: at most 200 Mbit/s",
        }
    ]
    await put(api, zones=["b", "a"], rate=1_000_000)
    await put(api, group="g", rate="25MB")
    await put(api, node="a", rate="1Gbit")
    await put(api, zones=["a", "b"], rate=2_000_000)
    assert await texts(api) == [
        "each agent: at most 200 Mbit/s",
        "zones a and b: at most 16 Mbit/s",
        "group g: at most 200 Mbit/s",
        "node a: at most 1 Gbit/s",
    ]
    for scope in ({}, {"zones": ["a", "b"]}, {"node": "a"}, {"node": "never set"}):
        assert (await put(api, **scope, rate=None)).status_code == 200
    assert await texts(api) == ["group g: at most 200 Mbit/s"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"rate": 65535}, "less than one chunk (64 KiB) per second: an op would seem to stand st"),
        ({"rate": -1}, "less than one chunk"),
        ({"rate": "0.1Mbit"}, "less than one chunk"),
        ({"rate": "fast"}, "is a rate such as 200Mbit, 25MB or 25000000"),
        ({"rate": 1e6}, "rate"),
        ({"rate": True}, "rate"),
        ({}, "rate"),
        ({"rate": 10**6, "node": "a", "group": "g"}, "give one of them"),
        ({"rate": None, "node": "a", "group": "g"}, "give one of them"),
        ({"rate": 10**6, "zones": ["a"]}, "names two of them"),
        ({"rate": 10**6, "zones": ["a", "b", "c"]}, "zones"),
        ({"rate": 10**6, "zones": ["a", "z" * 129]}, "zones"),
        ({"rate": 10**6, "rank": 1}, "rank"),
    ],
)
async def test_what_is_no_cap_is_refused_with_the_reason(
    api: ApiClient, body: dict[str, Any], why: str
) -> None:
    assert why in error_of(await put(api, **body), 400, "AF101")["message"]
    assert await texts(api) == []


async def test_only_an_administrator_sets_caps_and_everybody_sees_them(api: ApiClient) -> None:
    await put(api, rate=10**6)
    api.http.headers["authorization"] = "Bearer join"
    refused = await put(api, rate=None)
    assert refused.status_code == 403
    assert "administrator's token" in refused.json()["error"]["message"]
    assert len(await texts(api)) == 1


async def test_there_are_no_more_than_so_many(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_LIMITS", 2)
    await put(api, group="a", rate=10**6)
    await put(api, group="b", rate=10**6)
    assert (
        "there are 2 limits"
        in error_of(await put(api, group="c", rate=10**6), 400, "AF101")["message"]
    )
    assert (await put(api, group="a", rate=2 * 10**6)).status_code == 200


async def test_a_cap_of_another_version_is_refused_and_the_error_says_where_it_is(
    api: ApiClient,
) -> None:
    await api.store.limits.put(Cap(rate=10**6))
    await api.store._client.hset(keys.LIMITS, "each agent", '{"schema": 99}')
    response = await api.http.get("/v1/limits")
    assert response.status_code == 503
    assert "allfold:limits" in response.json()["error"]["message"]
