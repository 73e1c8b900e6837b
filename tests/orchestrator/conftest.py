"""Fixtures of the orchestrator's tests.

The stores' tests run twice, against the in-process Redis and against a real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from fakeredis import FakeServer

from allfold_cluster.redis_server import RedisServer
from allfold_orchestrator.membership import terms
from allfold_orchestrator.membership.group_state import NodeInfo
from allfold_orchestrator.membership.nodes import NodeRecord
from allfold_orchestrator.store.life import Clock
from allfold_orchestrator.store.redis_client import Client, connect, connect_embedded
from allfold_orchestrator.store.store import Store
from tests.support.require import requires

LEASE_SECONDS = 5.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class ManualClock:
    """A lease's time, moved by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def synchronize(self) -> None:
        """It is never wrong."""


@pytest.fixture(autouse=True)
def generations_begin_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the numbers of a new store's generation and openings be known, which chance gives."""
    monkeypatch.setattr(terms, "FIRST_GENERATIONS", 1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    requires("redis")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test alone, which may take it away."""
    requires("redis")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


class Backend(Protocol):
    """A Redis: all of its clients share one state."""

    def client(self) -> Client: ...


class Embedded:
    """One in-process Redis, however many clients there are."""

    def __init__(self) -> None:
        self.server = FakeServer()

    def client(self) -> Client:
        return connect_embedded(self.server)


class Real:
    """The private redis-server, emptied for each test."""

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self) -> Client:
        return connect(self.url)


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.redis)])
async def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "embedded":
        return Embedded()
    return await emptied(request.getfixturevalue("redis_server"))


@pytest.fixture
async def real(redis_server: RedisServer) -> Real:
    return await emptied(redis_server)


async def emptied(server: RedisServer) -> Real:
    client = connect(server.url)
    await client.flushall()  # type: ignore[attr-defined]
    await client.aclose()
    return Real(server.url)


MakeStore = Callable[..., Store]


@pytest.fixture
async def make_store(backend: Backend) -> AsyncIterator[MakeStore]:
    """Replicas on one backend: ``make_store()`` as often as needed."""
    stores: list[Store] = []

    def make(clock: Clock | None = None) -> Store:
        stores.append(Store(backend.client(), LEASE_SECONDS, clock))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
def store(make_store: MakeStore, clock: ManualClock) -> Store:
    return make_store(clock)


async def register(store: Store, info: NodeInfo) -> None:
    """Register a node that must not be refused."""
    assert await store.nodes.register(NodeRecord(info, 0.0)) is None
