"""Many keep-alive connections that send prepared requests, as cheaply as Python can.

A client library costs more CPU per request than the service that is measured, so this speaks just
enough HTTP/1.1: answers have a ``Content-Length``.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

ANSWER_SECONDS = 60.0
# Opened before they are needed: of thousands that are idle, a service ends some.
MOST_IDLE = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: the length of its body as it was on the wire, and its times (monotonic)."""

    status: int
    nbytes: int
    begun: float
    finished: float


@dataclass(slots=True)
class Load:
    """All answers of one phase."""

    begun: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def statuses(self) -> dict[int, int]:
        """Count the answers by their status."""
        return dict(Counter(answer.status for answer in self.answers))

    @property
    def nbytes(self) -> int:
        """Bytes of all bodies."""
        return sum(answer.nbytes for answer in self.answers)

    @property
    def finished(self) -> float:
        """Return the time of the last answer."""
        return max(answer.finished for answer in self.answers)

    def times(self, since: float | None = None) -> list[float]:
        """Seconds from each request, or from ``since``, to its answer."""
        return [each.finished - (each.begun if since is None else since) for each in self.answers]


class Connection(asyncio.Protocol):
    """One connection with at most one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._reply: asyncio.Future[tuple[int, int]] | None = None
        self._head = b""
        self._status = 0
        self._length = -1
        self._got = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    async def send(self, request: bytes) -> Answer:
        """The answer to one prepared request."""
        begun = perf_counter()
        self._reply = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_SECONDS):
            status, nbytes = await self._reply
        return Answer(status, nbytes, begun, perf_counter())

    def data_received(self, data: bytes) -> None:
        if self._length < 0:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._status = int(head[9:12])
            self._length = _content_length(head)
            self._head = b""
        self._got += len(data)
        if self._got >= self._length:
            self._finish()

    def _finish(self) -> None:
        reply, self._reply = self._reply, None
        length, self._length, self._got = self._length, -1, 0
        if reply is not None and not reply.done():
            reply.set_result((self._status, length))

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error or ConnectionError("the service hung up"))

    def close(self) -> None:
        self._transport.close()


class Clients:
    """A pool of connections to one or more replicas, in turn."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self.connections: list[Connection] = []

    async def open(self, count: int) -> None:
        """Have at least ``count`` connections, or :data:`MOST_IDLE`."""
        while len(self.connections) < min(count, MOST_IDLE):
            await self._connect()

    async def _connect(self) -> Connection:
        address = self._addresses[len(self.connections) % len(self._addresses)]
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, host, int(port))
        self.connections.append(connection)
        return connection

    async def run(
        self, requests: Sequence[bytes], count: int, all_sent: asyncio.Event | None = None
    ) -> Load:
        """Send all requests over ``count`` connections, each as soon as one is free.

        Args:
            all_sent: is set with the last one.
        """
        await self.open(count)
        kept, opening = list(self.connections), asyncio.Semaphore(MOST_IDLE)
        load, queue = Load(perf_counter()), enumerate(requests, 1)

        async def work(index: int) -> None:
            if index < len(kept):
                connection = kept[index]
            else:
                async with opening:
                    connection = await self._connect()
            for number, request in queue:
                # Who waits for it has his turn after the request is written.
                if all_sent is not None and number == len(requests):
                    all_sent.set()
                load.answers.append(await connection.send(request))

        async with asyncio.TaskGroup() as group:
            for index in range(count):
                group.create_task(work(index))
        return load

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def request(method: str, path: str, body: Any = None) -> bytes:
    """The bytes of a request as an agent's client sends it."""
    content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: orchestrator",
        "Accept: */*",
        "Accept-Encoding: gzip, deflate",
        "Connection: keep-alive",
        "User-Agent: allfold-scale",
    ]
    if content:
        lines += [f"Content-Length: {len(content)}", "Content-Type: application/json"]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    raise ValueError(f"an answer without a length: {head!r}")
