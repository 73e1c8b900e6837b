"""The client of the event loop: its requests, and the connections that it keeps."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest

from allfold_agent.http import async_client
from allfold_agent.http.async_client import Answer, AsyncHttpClient
from tests.support.waiting import until

SECONDS = 10.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Script = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Served:
    """A server that does with each request what a script says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.url = ""
        self.connections = 0
        self.requests: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                request = line.decode()
                while (header := await reader.readline()) != b"\r\n":
                    request += header.decode()
                size = request.lower().partition("content-length: ")[2].split("\r")[0]
                request += (await reader.readexactly(int(size or 0))).decode()
                self.requests.append(request)
                await self._script(request, writer)
        finally:
            writer.close()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Served, AsyncHttpClient]]:
    served, client = Served(script), AsyncHttpClient({"Authorization": "Bearer secret"})
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served, client
    finally:
        client.close()
        server.close()


async def ask(
    client: AsyncHttpClient, url: str, method: str = "GET", timeout: float = SECONDS, **request: Any
) -> Answer:
    return await client.request(method, url, connect_timeout=SECONDS, timeout=timeout, **request)


async def answer_ok(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


async def hang_up(_: str, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_a_request_has_its_path_its_parameters_its_body_and_the_headers_of_all() -> None:
    async def run() -> None:
        async with serving(answer_ok) as (served, client):
            body = json.dumps({"rank": 1}).encode()
            assert await ask(client, f"{served.url}/v1/x") == (200, b"{}")
            await ask(client, f"{served.url}/base/y", "PUT", params={"wait": 0.5, "session": "a b"})
            await ask(client, served.url, "POST", json=body)
            first, second, third = served.requests
            assert first.startswith("GET /v1/x HTTP/1.1\r\n")
            assert f"Host: {served.url.removeprefix('http://')}\r\n" in first
            assert "Authorization: Bearer secret\r\n" in first
            assert second.startswith("PUT /base/y?wait=0.5&session=a+b HTTP/1.1\r\n")
            assert third.startswith("POST / HTTP/1.1\r\n")
            assert third.endswith(body.decode())

    asyncio.run(run())


def test_an_answer_may_come_in_chunks() -> None:
    async def in_chunks(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b'3\r\n{"a\r\n4\r\n": 1\r\n1\r\n}\r\n0\r\n\r\n')

    async def run() -> None:
        async with serving(in_chunks) as (served, client):
            assert await ask(client, served.url) == (201, b'{"a": 1}')

    asyncio.run(run())


@pytest.mark.parametrize("damage", [0, 1, 12])
def test_an_answer_may_be_compressed_and_a_damaged_one_is_an_error(damage: int) -> None:
    body = gzip.compress(b'{"a": 1}' * 1000)
    sent = body[:-damage] if damage else body

    async def compressed(request: str, writer: asyncio.StreamWriter) -> None:
        assert "Accept-Encoding: gzip\r\n" in request
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)

    async def run() -> None:
        async with serving(compressed) as (served, client):
            if damage:
                with pytest.raises(OSError, match="damaged"):
                    await ask(client, served.url)
            else:
                assert await ask(client, served.url) == (200, b'{"a": 1}' * 1000)

    asyncio.run(run())


def test_one_request_after_the_other_goes_over_one_connection_and_two_at_once_over_two() -> None:
    async def run() -> None:
        async with serving(answer_ok) as (served, client):
            for _ in range(3):
                await ask(client, served.url)
            assert served.connections == 1
            await asyncio.gather(ask(client, served.url), ask(client, served.url))
            assert served.connections == 2

    asyncio.run(run())


def test_a_connection_that_the_server_has_ended_is_replaced() -> None:
    async def answer_and_hang_up(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    async def run() -> None:
        async with serving(answer_and_hang_up) as (served, client):
            for number in (1, 2, 3):
                assert (await ask(client, served.url)).status == 200
                assert served.connections == number

    asyncio.run(run())


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_client, "KEEP_SECONDS", 0.0)

    async def run() -> None:
        async with serving(answer_ok) as (served, client):
            await ask(client, served.url)
            await ask(client, served.url)
            assert served.connections == 2

    asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_late_answer_is_not_taken_for_that_of_the_next_request(is_cancelled: bool) -> None:
    async def run() -> None:
        late = asyncio.Event()

        async def answer(request: str, writer: asyncio.StreamWriter) -> None:
            if "/late" in request:
                await late.wait()
            writer.write(OK.replace(b"{}", b"[]") if "/late" in request else OK)

        async with serving(answer) as (served, client):
            if is_cancelled:
                asking = asyncio.ensure_future(ask(client, f"{served.url}/late"))
                await until(lambda: bool(served.requests), "it is asked")
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            else:
                with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
                    await ask(client, f"{served.url}/late", timeout=0.01)
            late.set()
            assert await ask(client, served.url) == (200, b"{}")
            assert served.connections == 2

    asyncio.run(run())


def test_an_end_before_the_answer_and_what_is_no_http_are_errors() -> None:
    async def babble(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"who is there?\r\n\r\n")

    async def fails(script: Script) -> None:
        async with serving(script) as (served, client):
            with pytest.raises((OSError, h11.ProtocolError)):
                await ask(client, served.url)

    asyncio.run(fails(hang_up))
    asyncio.run(fails(babble))


def test_nobody_listens() -> None:
    async def run() -> None:
        async with serving(answer_ok) as (served, client):
            url = served.url
        with pytest.raises(ConnectionRefusedError):
            await ask(client, url)

    asyncio.run(run())
