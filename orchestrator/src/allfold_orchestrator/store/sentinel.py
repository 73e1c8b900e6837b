"""A Redis that Sentinels watch: its URL, and connections to whichever server is its master."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

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
