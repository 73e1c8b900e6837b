"""A Redis in this process, as far as the orchestrator uses it; it may lose what it has.

Transactions, expiry and announcements are those of Redis: ``test_store`` compares them with
fakeredis. Each command, or pipeline of them, takes the way there and back.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.exceptions import WatchError

from allfold_orchestrator.store.redis_client import ANSWER_SECONDS, CONNECT_SECONDS
from allfold_orchestrator.store.timing import CommandTimes
from tests.simulator.network import Network
from tests.support.virtual_loop import Process, VirtualLoop


class Tables:
    """The keys of a database, and the commands on them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[str, Any] = {}
        self._until: dict[str, float] = {}
        self._changes: defaultdict[str, int] = defaultdict(int)
        self._rng = random.Random(1)
        self.on_hset: Callable[[str, Mapping[str, str]], None] = lambda *_: None
        self.on_publish: Callable[[str], int] = lambda _: 0

    def snapshot(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return everything as it is now."""
        return copy.deepcopy(self._values), dict(self._until)

    def go_back(self, to: tuple[dict[str, Any], dict[str, float]]) -> None:
        """Have everything be as it was."""
        for key in self._values.keys() | to[0].keys():
            self._changes[key] += 1
        self._values, self._until = copy.deepcopy(to[0]), dict(to[1])

    def version(self, key: str) -> int:
        """Return a number that grows with each change of a key."""
        self._look(key)
        return self._changes[key]

    def _look(self, key: str) -> Any:
        """Return the value of a key, or ``None``."""
        until = self._until.get(key)
        if until is not None and until <= self._clock():
            self._remove(key)
        return self._values.get(key)

    def _remove(self, key: str) -> bool:
        self._until.pop(key, None)
        if self._values.pop(key, None) is None:
            return False
        self._changes[key] += 1
        return True

    def _change(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the value of a key to be changed; makes it if need be."""
        value = self._look(key)
        if value is None:
            value = self._values[key] = make()
        self._changes[key] += 1
        return value

    def _clean(self, key: str) -> None:
        if not self._values.get(key):
            self._remove(key)

    # Strings and keys

    def ping(self) -> bool:
        return True

    def get(self, name: str) -> str | None:
        value = self._look(name)
        assert value is None or isinstance(value, str)
        return value

    def mget(self, keys: Sequence[str]) -> list[str | None]:
        return [self.get(key) for key in keys]

    def set(
        self, name: str, value: str, ex: int | None = None, px: int | None = None, nx: bool = False
    ) -> bool | None:
        if nx and self._look(name) is not None:
            return None
        self._values[name] = value
        self._changes[name] += 1
        self._until.pop(name, None)
        if ex is not None or px is not None:
            self._until[name] = self._clock() + (ex or 0) + (px or 0) / 1000
        return True

    def delete(self, *names: str) -> int:
        return sum(self._look(name) is not None and self._remove(name) for name in names)

    def expire(self, name: str, time: int) -> bool:
        if self._look(name) is None:
            return False
        self._until[name] = self._clock() + time
        return True

    def persist(self, name: str) -> bool:
        return self._look(name) is not None and self._until.pop(name, None) is not None

    # Hashes

    def hget(self, name: str, key: str) -> str | None:
        found: str | None = (self._look(name) or {}).get(key)
        return found

    def hgetall(self, name: str) -> dict[str, str]:
        return dict(self._look(name) or {})

    def hset(
        self,
        name: str,
        key: str | None = None,
        value: str | None = None,
        mapping: Mapping[str, str] | None = None,
    ) -> int:
        table = self._change(name, dict)
        fields = dict(mapping or {})
        if key is not None and value is not None:
            fields[key] = value
        new = len(fields.keys() - table.keys())
        table.update(fields)
        self.on_hset(name, fields)
        return new

    def hmget(self, name: str, keys: Sequence[str]) -> list[str | None]:
        table = self._look(name) or {}
        return [table.get(key) for key in keys]

    def hdel(self, name: str, *keys: str) -> int:
        if not self._look(name):
            return 0
        table = self._change(name, dict)
        gone = [table.pop(key) for key in keys if key in table]
        self._clean(name)
        return len(gone)

    # Lists

    def lpush(self, name: str, *values: str) -> int:
        items = self._change(name, list)
        for value in values:
            items.insert(0, value)
        return len(items)

    def lrange(self, name: str, start: int, end: int) -> list[str]:
        return _part(self._look(name) or [], start, end)

    def ltrim(self, name: str, start: int, end: int) -> bool:
        if self._look(name):
            items = self._change(name, list)
            items[:] = _part(items, start, end)
            self._clean(name)
        return True

    # Sets

    def sadd(self, name: str, *values: str) -> int:
        members = self._change(name, dict)
        before = len(members)
        members.update(dict.fromkeys(values))
        return len(members) - before

    def srem(self, name: str, *values: str) -> int:
        if not self._look(name):
            return 0
        members = self._change(name, dict)
        before = len(members)
        for value in values:
            members.pop(value, None)
        gone = before - len(members)
        self._clean(name)
        return gone

    def smembers(self, name: str) -> AbstractSet[str]:
        return frozenset(self._look(name) or ())

    def srandmember(self, name: str, number: int) -> list[str]:
        members = sorted(self._look(name) or ())
        return self._rng.sample(members, min(number, len(members)))

    # Sorted sets

    def zadd(self, name: str, mapping: Mapping[str, float], xx: bool = False) -> int:
        if xx and not self._look(name):
            return 0
        scores = self._change(name, dict)
        before = len(scores)
        scores.update({k: float(v) for k, v in mapping.items() if not xx or k in scores})
        return len(scores) - before

    def zrem(self, name: str, *values: str) -> int:
        return self.srem(name, *values)

    def zscore(self, name: str, value: str) -> float | None:
        found: float | None = (self._look(name) or {}).get(value)
        return found

    def zmscore(self, key: str, members: list[str]) -> list[float | None]:
        return [self.zscore(key, member) for member in members]

    def _sorted(self, name: str) -> list[tuple[str, float]]:
        return sorted((self._look(name) or {}).items(), key=lambda each: (each[1], each[0]))

    def zrange(self, name: str, start: int, end: int, *, withscores: bool = False) -> list[Any]:
        found = _part(self._sorted(name), start, end)
        return found if withscores else [member for member, _ in found]

    def zrangebyscore(self, name: str, min: float | str, max: float | str) -> list[str]:
        low, above = _bound(min)
        high, below = _bound(max)
        return [
            member
            for member, score in self._sorted(name)
            if (low < score or (low == score and not above))
            and (score < high or (score == high and not below))
        ]

    def publish(self, channel: str, message: str) -> int:
        return self.on_publish(message)


def _part(items: list[Any], start: int, end: int) -> list[Any]:
    """Return the items from one place to another, as Redis counts: the last one is included."""
    start = max(0, start + len(items)) if start < 0 else start
    end = end + len(items) if end < 0 else end
    return items[start : end + 1]


def _bound(text: float | str) -> tuple[float, bool]:
    """Return a score, and whether it is excluded."""
    is_open = isinstance(text, str) and text.startswith("(")
    return float(text[1:] if isinstance(text, str) and is_open else text), is_open


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
