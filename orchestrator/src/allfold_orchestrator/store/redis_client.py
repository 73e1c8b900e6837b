"""The part of Redis that the orchestrator uses, typed for a client that decodes its answers.

No Lua and no modules, so that the in-process Redis runs exactly the same code as a real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from allfold_orchestrator.store import sentinel
from allfold_orchestrator.store.timing import CommandTimes, TimedRedis

if TYPE_CHECKING:
    from fakeredis import FakeServer

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


class Channel(Protocol):
    """A subscription."""

    def subscribe(self, *channels: str) -> Awaitable[None]: ...
    def listen(self) -> AsyncIterator[dict[str, Any]]: ...


class Client(Commands, Protocol):
    """A connection pool; ``is_embedded`` if its Redis is one of this process."""

    is_embedded: bool
    times: CommandTimes

    def pipeline(self, transaction: bool = True) -> AbstractAsyncContextManager[Pipeline]: ...
    def pubsub(self) -> AbstractAsyncContextManager[Channel]: ...
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
    make_pool = (
        sentinel.master_pool
        if url.startswith(sentinel.SCHEMES)
        else BlockingConnectionPool.from_url
    )
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
