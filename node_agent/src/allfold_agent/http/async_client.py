"""Requests from an event loop, over connections that are kept for the next ones.

A join is two requests of each rank, all at the same moment, so what one costs the processor counts.
"""

from __future__ import annotations

import asyncio
import gzip
import ssl
import zlib
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import h11

from allfold_agent.http.wire import HEAD_LIMIT, RECEIVE_BYTES, header_dict

# Shorter than servers keep a connection that is idle.
KEEP_SECONDS = 4.0

Params = Mapping[str, str | int | float]


class Answer(NamedTuple):
    """The status and the body of a response."""

    status: int
    body: bytes


class _Origin(NamedTuple):
    host: str
    port: int
    is_secure: bool


class _Connection:
    """A connection to a server, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        self._idle_since = 0.0

    @property
    def is_usable(self) -> bool:
        """True while the server has not ended it, and will not at any moment."""
        is_open = not (self._reader.at_eof() or self._writer.is_closing())
        return is_open and monotonic() < self._idle_since + KEEP_SECONDS

    async def ask(self, request: h11.Request, body: bytes) -> Answer:
        """Send a request and return the response."""
        sent = self._h11.send(request) or b""
        if body:
            sent += self._h11.send(h11.Data(data=body)) or b""
        self._writer.write(sent + (self._h11.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        status, encoding, parts = 0, "", []
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                data = await self._reader.read(RECEIVE_BYTES)
                if not (data or status):
                    raise ConnectionAbortedError("the connection ended before an answer")
                self._h11.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
                encoding = header_dict(event).get("content-encoding", "")
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, _decoded(b"".join(parts), encoding))

    def renew(self) -> bool:
        """Make it ready for the next request; return False where there can be none."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._idle_since = monotonic()
        return True

    def close(self) -> None:
        self._writer.close()


class AsyncHttpClient:
    """Asks servers. It belongs to one event loop.

    Args:
        headers: of every request.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = dict(headers)
        self._kept: dict[_Origin, list[_Connection]] = defaultdict(list)
        self._tls: ssl.SSLContext | None = None

    def close(self) -> None:
        """End the connections that are kept."""
        for kept in self._kept.values():
            while kept:
                kept.pop().close()

    async def request(
        self,
        method: str,
        url: str,
        *,
        params: Params | None = None,
        json: bytes = b"",
        connect_timeout: float,
        timeout: float,
    ) -> Answer:
        """Send a request, which may be repeated, and return its answer, whatever its status.

        Args:
            json: the body.
            connect_timeout: seconds for a new connection.
            timeout: seconds from there to the end of the answer.

        Raises:
            OSError: there is no connection, or it has ended, or time is up.
            h11.ProtocolError: what was answered is no HTTP.
        """
        parts = urlsplit(url)
        is_secure = parts.scheme == "https"
        origin = _Origin(parts.hostname or "", parts.port or (443 if is_secure else 80), is_secure)
        headers = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "gzip"}
        headers |= self._headers
        if json:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(json))}
        target = f"{parts.path or '/'}?{urlencode(params)}" if params else parts.path or "/"
        request = h11.Request(method=method, target=target, headers=list(headers.items()))
        kept = self._idle(origin)
        if kept is not None:
            with suppress(ConnectionError):  # the server may have ended it at this moment
                return await self._ask(origin, kept, request, json, timeout)
        connection = await self._connect(origin, connect_timeout)
        return await self._ask(origin, connection, request, json, timeout)

    async def _ask(
        self,
        origin: _Origin,
        connection: _Connection,
        request: h11.Request,
        body: bytes,
        timeout: float,
    ) -> Answer:
        is_kept = False
        try:
            async with asyncio.timeout(timeout):
                answer = await connection.ask(request, body)
            is_kept = connection.renew()
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        finally:  # also where the caller was cancelled: an answer to come is not the next one's
            if is_kept:
                self._kept[origin].append(connection)
            else:
                connection.close()
        return answer

    def _idle(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last, if one is left that may be used again."""
        kept = self._kept[origin]
        while kept:
            connection = kept.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _connect(self, origin: _Origin, timeout: float) -> _Connection:
        if origin.is_secure and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if origin.is_secure else None
        try:
            async with asyncio.timeout(timeout):
                opened = await asyncio.open_connection(origin.host, origin.port, ssl=tls)
        except TimeoutError:
            raise TimeoutError(f"no connection within {timeout:g} s") from None
        return _Connection(*opened)


def _decoded(body: bytes, encoding: str) -> bytes:
    """Return a body without its encoding; plans of thousands of nodes travel compressed."""
    if encoding != "gzip":
        return body
    try:
        return gzip.decompress(body)
    except (EOFError, zlib.error) as error:
        raise OSError(f"a compressed answer is damaged: {error}") from error
