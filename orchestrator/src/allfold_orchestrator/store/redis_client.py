"""The part of Redis that the orchestrator uses, typed for a client that decodes its answers.

No Lua and no modules, so that the in-process Redis runs exactly the same code as a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio import client as redis_asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError, WatchError

from allfold_service.metrics import Histogram

if TYPE_CHECKING:
    from fakeredis import FakeServer


T = TypeVar("T")

_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class CommandTimes:
    """The times of the commands of one client.

    Attributes:
        seconds: of each, or of each batch that went out together; with the wait for a connection.
        failures: how many had no answer, or an error. A lost race is none.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(_BOUNDS)
        self.failures = 0

    async def of(self, command: Awaitable[T]) -> T:
        """Await a command, and note how long it took."""
        began = perf_counter()
        try:
            return await command
        except WatchError:
            raise
        except (RedisError, OSError):
            self.failures += 1
            raise
        finally:
            self.seconds.observe(perf_counter() - began)


class TimedRedis(Redis):
    """A client whose commands are timed, also those of its pipelines."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.times = CommandTimes()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        command = super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return await self.times.of(command)

    def pipeline(
        self, transaction: bool = True, shard_hint: str | None = None
    ) -> redis_asyncio.Pipeline:
        pool, callbacks = self.connection_pool, self.response_callbacks
        return _TimedPipeline(self.times, pool, callbacks, transaction, shard_hint)


class _TimedPipeline(redis_asyncio.Pipeline):
    def __init__(self, times: CommandTimes, *args: Any) -> None:
        super().__init__(*args)
        self._times = times

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return await self._times.of(super().execute(raise_on_error))

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        command = super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return await self._times.of(command)


SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
_PORT = 26379
_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True)
class SentinelUrl:
    """``redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/master[/db]``.

    Attributes:
        sentinels: their hosts and ports.
        master: the name that the Sentinels have for the Redis.
        db: the number of the database.
        login: ``username`` and ``password`` for Redis, as far as given.
        sentinel_login: those for the Sentinels, from the options of the URL.
        is_encrypted: with ``rediss+sentinel``, TLS to Redis and to the Sentinels.
    """

    sentinels: tuple[tuple[str, int], ...]
    master: str
    db: int
    login: dict[str, str]
    sentinel_login: dict[str, str]
    is_encrypted: bool


def parse(url: str) -> SentinelUrl:
    """Return the parts of a URL.

    Raises:
        ValueError: a part is wrong; the message has no password.
    """
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    login = {"username": unquote(user), "password": unquote(password)}
    master, _, db = parts.path.strip("/").partition("/")
    options = dict(parse_qsl(parts.query))
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise ValueError(f"has the unknown option {unknown[0]!r}; known are {', '.join(_OPTIONS)}")
    if not master:
        raise ValueError("must end with the name that the Sentinels have for the Redis: /mymaster")
    if not (db or "0").isdecimal():
        raise ValueError(f"must have the number of a database behind the master, got {db!r}")
    return SentinelUrl(
        sentinels=tuple(_address(host) for host in hosts.split(",")),
        master=unquote(master),
        db=int(db or 0),
        login={name: value for name, value in login.items() if value},
        sentinel_login={_OPTIONS[name]: value for name, value in options.items()},
        is_encrypted=parts.scheme == "rediss+sentinel",
    )


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host, port = None, 0
    if not host:
        raise ValueError(f"must name each Sentinel as host or host:port, got {text!r}")
    return host, port


class _MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the master of the moment; who finds all of them in use waits for one."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections; with those in use, the pool's end, also those to the Sentinels."""
        try:
            await super().disconnect(inuse_connections)
        finally:
            if inuse_connections:
                sentinels = self.sentinel_manager.sentinels
                await asyncio.gather(*(each.aclose() for each in sentinels))


def master_pool(url: str, **options: Any) -> BlockingConnectionPool:
    """Return a pool whose new connections ask the Sentinels where the master is.

    Args:
        options: of the pool and of its connections; the sockets' hold for the Sentinels, too.
    """
    parsed = parse(url)
    encryption = {"ssl": True} if parsed.is_encrypted else {}
    sockets = {name: value for name, value in options.items() if name.startswith("socket_")}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        parsed.sentinels, sentinel_kwargs={**sockets, **parsed.sentinel_login, **encryption}
    )
    own = {"db": parsed.db, **parsed.login, **encryption}
    return _MasterPool(  # type: ignore[no-untyped-call]
        parsed.master, sentinels, **options, **own
    )


EMBEDDED = "embedded"
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
# A request that finds all connections in use waits for one. The default pool would refuse the
# hundredth of a thousand ranks that come at once.
_POOL: dict[str, Any] = {"max_connections": 32, "timeout": 5.0, "decode_responses": True}


class Commands(Protocol):
    """The commands of both a client and a pipeline."""

    def get(self, name: str) -> Awaitable[str | None]: ...
    def mget(self, keys: Sequence[str]) -> Awaitable[list[str | None]]: ...
    def set(
        self,
        name: str,
        value: str,
        ex: int | None = None,
        px: int | None = None,
        nx: bool = False,
    ) -> Awaitable[object]: ...
    def delete(self, *names: str) -> Awaitable[int]: ...
    def expire(self, name: str, time: int) -> Awaitable[object]: ...
    def persist(self, name: str) -> Awaitable[object]: ...

    def hget(self, name: str, key: str) -> Awaitable[str | None]: ...
    def hgetall(self, name: str) -> Awaitable[dict[str, str]]: ...
    def hset(
        self,
        name: str,
        key: str | None = None,
        value: str | None = None,
        mapping: Mapping[str, str] | None = None,
    ) -> Awaitable[int]: ...
    def hmget(self, name: str, keys: Sequence[str]) -> Awaitable[list[str | None]]: ...
    def hdel(self, name: str, *keys: str) -> Awaitable[int]: ...

    def lpush(self, name: str, *values: str) -> Awaitable[int]: ...
    def lrange(self, name: str, start: int, end: int) -> Awaitable[list[str]]: ...
    def ltrim(self, name: str, start: int, end: int) -> Awaitable[object]: ...

    def sadd(self, name: str, *values: str) -> Awaitable[int]: ...
    def srem(self, name: str, *values: str) -> Awaitable[int]: ...
    def smembers(self, name: str) -> Awaitable[AbstractSet[str]]: ...
    def srandmember(self, name: str, number: int) -> Awaitable[list[str]]: ...

    def zadd(self, name: str, mapping: Mapping[str, float], xx: bool = False) -> Awaitable[int]: ...
    def zrem(self, name: str, *values: str) -> Awaitable[int]: ...
    def zscore(self, name: str, value: str) -> Awaitable[float | None]: ...
    def zmscore(self, key: str, members: list[str]) -> Awaitable[list[float | None]]: ...
    def zrange(
        self, name: str, start: int, end: int, *, withscores: bool = False
    ) -> Awaitable[list[Any]]: ...
    def zrangebyscore(
        self, name: str, min: float | str, max: float | str
    ) -> Awaitable[list[str]]: ...

    def publish(self, channel: str, message: str) -> Awaitable[int]: ...


class Pipeline(Commands, Protocol):
    """Commands that go out together; after ``watch`` they go out at once, until ``multi``."""

    def watch(self, *names: str) -> Awaitable[object]: ...
    def multi(self) -> None: ...
    def execute(self) -> Awaitable[list[Any]]: ...


class PubSubChannel(Protocol):
    """A subscription."""

    def subscribe(self, *channels: str) -> Awaitable[None]: ...
    def listen(self) -> AsyncIterator[dict[str, Any]]: ...


class Client(Commands, Protocol):
    """A connection pool; ``is_embedded`` if its Redis is one of this process."""

    is_embedded: bool
    times: CommandTimes

    def pipeline(self, transaction: bool = True) -> AbstractAsyncContextManager[Pipeline]: ...
    def pubsub(self) -> AbstractAsyncContextManager[PubSubChannel]: ...
    def ping(self) -> Awaitable[object]: ...
    def time(self) -> Awaitable[tuple[int, int]]: ...
    def info(self, section: str) -> Awaitable[dict[str, Any]]: ...
    def aclose(self) -> Awaitable[None]: ...


def connect(url: str, password_file: str = "") -> Client:
    """A client of the Redis at ``url``, or of a new in-process one for ``embedded``.

    It connects when it is first used, so Redis may start later than the orchestrator. Where
    Sentinels are named, it follows the master that they have.

    Args:
        url: may have the password, unless there is a file with it.
        password_file: path of a file with it, read again for each new connection: a changed
            password needs no restart.
    """
    if url == EMBEDDED:
        from fakeredis import FakeServer  # with a Redis of their own, people need not wait for it

        return connect_embedded(FakeServer())
    make_pool = master_pool if url.startswith(SCHEMES) else BlockingConnectionPool.from_url
    pool = make_pool(
        url,
        **_POOL,
        socket_connect_timeout=CONNECT_SECONDS,
        socket_timeout=ANSWER_SECONDS,
        # One retry, because a connection from the pool may be one that Redis closed long ago.
        retry=Retry(NoBackoff(), 1),
        credential_provider=_PasswordFile(password_file) if password_file else None,
    )
    return cast(Client, _Remote.from_pool(pool))


def connect_embedded(server: FakeServer) -> Client:
    """A client of this in-process Redis."""
    from fakeredis import FakeAsyncRedisConnection

    pool = BlockingConnectionPool(connection_class=FakeAsyncRedisConnection, server=server, **_POOL)
    return cast(Client, _Embedded.from_pool(pool))


def read_password(file: str) -> str:
    """Return the password in a file.

    Raises:
        OSError: the file cannot be read, or is empty.
    """
    try:
        password = Path(file).read_text().strip()
    except OSError as error:
        raise OSError(f"cannot read {file}: {error.strerror}") from error
    if not password:
        raise OSError(f"{file} is empty; it must hold the password of Redis")
    return password


class _PasswordFile(CredentialProvider):
    def __init__(self, file: str) -> None:
        self._file = file

    def get_credentials(self) -> tuple[str]:
        return (read_password(self._file),)

    async def get_credentials_async(self) -> tuple[str]:
        return self.get_credentials()


class _Remote(TimedRedis):
    is_embedded = False


class _Embedded(TimedRedis):
    is_embedded = True
