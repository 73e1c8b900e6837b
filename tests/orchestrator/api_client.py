"""An orchestrator as an agent sees it, over an in-process connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from allfold_core.schema import MESSAGE
from allfold_orchestrator.http.app import create_app
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.store import Store


class ApiClient:
    """The requests of agents, with as few arguments as a test can do with."""

    def __init__(self, http: httpx.AsyncClient, app: FastAPI) -> None:
        self.http = http
        self.app = app

    @property
    def store(self) -> Store:
        store: Store = self.app.state.store
        return store

    async def register(self, node: str, incarnation: str = "1", **fields: Any) -> httpx.Response:
        body = {
            "node": node,
            "incarnation": incarnation,
            "control_url": f"http://{node}:7401",
            "data_address": f"{node}:7402",
        }
        return await self.http.post("/v1/nodes", json={**body, **fields})

    async def join(
        self, rank: int | None, node: str = "a", group: str = "train", **fields: Any
    ) -> httpx.Response:
        body: dict[str, Any] = {
            "rank": rank,
            "node": node,
            "incarnation": "1",
            "session": f"s{rank}",
            "world_size": 2,
            "timeout": 30.0,
            "strategies": {},
        }
        return await self.http.post(f"/v1/groups/{group}/ranks", json={**body, **fields})

    async def plan(
        self, session: str, wait: float = 0.0, opening: int = 1, group: str = "train"
    ) -> httpx.Response:
        query: dict[str, str | float] = {"epoch": opening, "session": session, "wait": wait}
        return await self.http.get(f"/v1/groups/{group}/plan", params=query)

    async def leave(self, rank: int, session: str | None = None, **query: Any) -> httpx.Response:
        query = {"session": session or f"s{rank}", **query}
        return await self.http.delete(f"/v1/groups/train/ranks/{rank}", params=query)

    async def group(self) -> dict[str, Any]:
        response = await self.http.get("/v1/groups/train")
        assert response.status_code == 200, response.text
        return body_of(response)


@asynccontextmanager
async def serving(
    settings: Settings | None = None, store: Store | None = None
) -> AsyncIterator[ApiClient]:
    """A running application and a client of it."""
    # No heartbeats are sent, so leases must outlast the slowest test.
    app = create_app(settings or Settings(lease_seconds=60), store)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://orchestrator") as http,
    ):
        yield ApiClient(http, app)


def body_of(response: httpx.Response) -> dict[str, Any]:
    """The fields of an answer, without the number of its schema."""
    return MESSAGE.read(response.json())


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, which must have this status and code."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"code", "message", "details"}
    assert error["code"] == code, error
    return error


async def form(api: ApiClient, world_size: int = 2) -> None:
    """A complete group, rank r on the r-th of the nodes a, b, c ..."""
    for rank in range(world_size):
        node = chr(ord("a") + rank)
        assert (await api.register(node)).status_code == 200
        assert (await api.join(rank, node, world_size=world_size)).status_code == 200
