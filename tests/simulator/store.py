"""A Redis in this process, as far as the orchestrator uses it; it may lose what it has.

Transactions, expiry and announcements are those of Redis: ``test_store`` compares them with
fakeredis. Each command, or pipeline of them, takes the way there and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.exceptions import WatchError

from allfold_orchestrator.store.redis_client import ANSWER_SECONDS, CONNECT_SECONDS, CommandTimes
from tests.simulator.network import Network
from tests.simulator.tables import Tables
from tests.support.virtual_loop import Process, VirtualLoop


class Server(Process):
    """The process of the store.

    Attributes:
        tables: what it has.
        saved: what it had at an earlier time, to which it may go back.
        life: how often it was started.
    """

    def __init__(self, loop: VirtualLoop, network: Network) -> None:
        super().__init__(loop, "the store", "store")
        self.network = network
        self.tables = Tables(loop.time)
        self.tables.on_publish = self._publish
        self.life = 1
        self.saved = self.tables.snapshot()
        self._listeners: list[_Listener] = []

    def restart(self, to: tuple[dict[str, Any], dict[str, float]] | None = None) -> None:
        """Begin anew, with what it has, or with what it had once."""
        if to is not None:
            self.tables.go_back(to)
        self.life += 1
        listeners, self._listeners = self._listeners, []
        for each in listeners:
            self.network.post(self, each.process, each.queue.put_nowait, None)

    def save(self) -> None:
        """Keep what it has now: it may go back to that."""
        self.saved = self.tables.snapshot()

    def listen(self, listener: _Listener) -> None:
        """Tell a listener of all that is published from now on."""
        self._listeners.append(listener)

    def _publish(self, message: str) -> int:
        self._listeners = [each for each in self._listeners if each.process.lives]
        for each in self._listeners:
            self.network.post(self, each.process, each.queue.put_nowait, message)
        return len(self._listeners)


class _Listener:
    """A subscription."""

    def __init__(self, client: Client) -> None:
        self.process = client.process
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._client = client

    async def subscribe(self, *_: str) -> None:
        await self._client.ask(lambda _: self._client.server.listen(self))

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            message = await self.queue.get()
            if message is None:
                raise RedisConnectionError("the store has ended the connection")
            yield {"type": "message", "data": message}


class Client:
    """One replica's connections to the store."""

    is_embedded = False

    def __init__(self, process: Process, server: Server) -> None:
        self.process = process
        self.server = server
        self.times = CommandTimes()

    async def ask(self, command: Callable[[Tables], Any]) -> Any:
        """Go to the store, do something there, and come back with the result."""
        network, here, server = self.server.network, self.process.host, self.server
        if network.is_cut(here, server.host):
            await asyncio.sleep(CONNECT_SECONDS)
            raise RedisTimeoutError("the store does not answer")
        await asyncio.sleep(network.delay(here, server.host))
        result = command(server.tables)
        if network.is_cut(server.host, here):
            await asyncio.sleep(ANSWER_SECONDS)
            raise RedisTimeoutError("no answer of the store")
        await asyncio.sleep(network.delay(server.host, here))
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def command(*args: Any, **named: Any) -> Any:
            return self.ask(lambda tables: getattr(tables, name)(*args, **named))

        return command

    async def time(self) -> tuple[int, int]:
        now = await self.ask(lambda _: asyncio.get_running_loop().time())
        return int(now), int(now % 1 * 1e6)

    async def info(self, _: str) -> dict[str, Any]:
        return {"run_id": await self.ask(lambda _: f"run {self.server.life}")}

    async def aclose(self) -> None:
        return

    @asynccontextmanager
    async def pubsub(self) -> AsyncIterator[_Listener]:
        yield _Listener(self)

    @asynccontextmanager
    async def pipeline(self, transaction: bool = True) -> AsyncIterator[Pipeline]:
        yield Pipeline(self)


class Pipeline:
    """Commands that go to the store together, if nobody has changed what was watched."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._watched: dict[str, int] = {}
        self._is_immediate = False
        self._queued: list[Callable[[Tables], Any]] = []

    async def watch(self, *names: str) -> None:
        def look(tables: Tables) -> None:
            for name in names:
                self._watched.setdefault(name, tables.version(name))

        self._is_immediate = True
        await self._client.ask(look)

    def multi(self) -> None:
        self._is_immediate = False

    async def execute(self) -> list[Any]:
        queued, self._queued = self._queued, []
        watched, self._watched = self._watched, {}

        def do(tables: Tables) -> list[Any]:
            if any(tables.version(name) != seen for name, seen in watched.items()):
                raise WatchError("somebody else has changed it")
            return [each(tables) for each in queued]

        self._is_immediate = False
        return list(await self._client.ask(do))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def command(*args: Any, **named: Any) -> Any:
            def do(tables: Tables) -> Any:
                return getattr(tables, name)(*args, **named)

            if self._is_immediate:
                return self._client.ask(do)
            self._queued.append(do)
            return self

        return command
