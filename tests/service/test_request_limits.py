"""Requests that are not complete: their time, the size of their heads, the number that waits."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from allfold_service import connections, request_limits, server
from allfold_service.connections import IdleConnections
from allfold_service.request_limits import HEAD_BYTES, AnswerWatch
from allfold_service.tls import TlsIdentity
from tests.support.credentials import certificates, with_tls
from tests.support.descriptors import no_descriptors_left
from tests.support.http_server import Server
from tests.support.waiting import until, within

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both loops that uvicorn takes: uvloop where it is installed."""
    return "asyncio", {"use_uvloop": request.param}


LARGE = 16 << 20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer ``ok`` at once, whatever the body; below ``/slow``, after its body has come.

    ``/large`` is long; ``/headers`` are the names of all that the request has, at its end.
    """
    body = b"ok"
    match scope["path"]:
        case "/slow":
            await receive()
            await asyncio.sleep(0.2)
        case "/large":
            body = bytes(LARGE)
        case "/headers":
            while (await receive())["more_body"]:
                pass
            body = b" ".join(name for name, _ in scope["headers"])
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for begin in range(0, len(body), LARGE // 2):
        end = begin + LARGE // 2
        part = body[begin:end]
        await send({"type": "http.response.body", "body": part, "more_body": end < len(body)})


class LimitedServer(Server, server.Server):
    """The server of the services, which begins and ends at once."""


class Port:
    """The address of such a server, and the connections that a test has opened to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.opened: list[asyncio.StreamWriter] = []
        self.served: Collection[object] = ()

    async def connect(self, host: str = "127.0.0.1", tls: TlsIdentity | None = None) -> Stream:
        sock = socket.socket()
        # So little that a server notices a client which does not read.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
        sock.bind((host, 0))
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.listener.getsockname())
        context, name = (tls.client, "allfold") if tls else (None, None)
        stream = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=name)
        self.opened.append(stream[1])
        return stream


@asynccontextmanager
async def serving(most_idle: int = 8, tls: TlsIdentity | None = None) -> AsyncIterator[Port]:
    port, idle = Port(), IdleConnections(most_idle)
    limited = LimitedServer(app, tls, keep_alive=5, graceful=30, idle=idle, lifespan="off")
    task = asyncio.create_task(limited.serve([port.listener]))
    await until(lambda: limited.started, "it serves")
    port.served = limited.server_state.connections
    try:
        yield port
    finally:
        for writer in port.opened:
            writer.close()
            with suppress(OSError):
                await within(10.0, writer.wait_closed())
        limited.end()
        await within(10.0, task)


@pytest.fixture
def tls(tmp_path: Path) -> TlsIdentity:
    with_it = with_tls(certificates(tmp_path, "a").path / "a").tls
    assert with_it is not None
    return with_it


async def rest_of(stream: Stream) -> bytes:
    """All until the server closes the connection."""
    with suppress(ConnectionError):
        return await within(10.0, stream[0].read())
    return b""


async def ok(stream: Stream) -> None:
    stream[1].write(GET)
    answer = await within(10.0, stream[0].readuntil(b"ok"))
    assert answer.startswith(b"HTTP/1.1 200")


def refused(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    error = json.loads(body)["error"]
    assert error["code"] == "AF100"
    return str(error["message"])


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"POST /slow HTTP/1.1\r\nContent-Length: 9\r\n\r\n1",
        b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1",
    ],
)
async def test_a_request_that_never_ends_is_ended(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_SECONDS", 0.2)
    async with serving() as port:
        fresh, kept = await port.connect(), await port.connect()
        await ok(kept)
        fresh[1].write(begun)
        if begun:
            kept[1].write(begun)
            await rest_of(kept)
        answer = await rest_of(fresh)
        if not begun.startswith(b"POST"):
            assert "within 0.2 s" in refused(answer, 408)


async def test_a_request_that_is_answered_slowly_is_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limits, "REQUEST_SECONDS", 0.1)
    async with serving() as port:
        stream = await port.connect()
        for _ in range(2):
            stream[1].write(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 200 " in await within(10.0, stream[0].readuntil(b"ok"))


@pytest.mark.parametrize("pieces", [1, 40])
async def test_a_head_that_is_too_large_is_refused(pieces: int) -> None:
    async with serving() as port:
        stream = await port.connect()
        stream[1].write(b"GET /")
        for _ in range(pieces):
            stream[1].write(b"x" * ((HEAD_BYTES + 4096) // pieces))
            await asyncio.sleep(0.001)
        stream[1].write(b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert "larger than 65536 bytes" in refused(await rest_of(stream), 431)
        await ok(await port.connect())


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"


@pytest.mark.parametrize("trailer", [b"a: b\r\n" * 3000, b"x" * 16_384])
async def test_a_trailer_that_is_too_large_ends_its_connection(trailer: bytes) -> None:
    async with serving() as port:
        stream = await port.connect()
        stream[1].write(CHUNKED + b"0\r\na: ")
        for _ in range(40):
            if not stream[1].is_closing():
                stream[1].write(trailer)
            await asyncio.sleep(0.001)
        await rest_of(stream)
        await ok(await port.connect())


async def test_a_long_body_of_small_chunks_is_not_taken_for_a_trailer() -> None:
    async with serving() as port:
        stream = await port.connect()
        stream[1].write(CHUNKED)
        for _ in range(20):
            stream[1].write(b"1\r\nx\r\n" * 3000)
            await asyncio.sleep(0.001)
        stream[1].write(b"0\r\na: b\r\n\r\n")
        assert b" 200 " in await within(10.0, stream[0].readuntil(b"ok"))
        await ok(stream)


async def test_a_trailer_adds_no_header() -> None:
    async with serving() as port:
        stream = await port.connect()
        request = CHUNKED.replace(b"/ HTTP/1.1", b"/headers HTTP/1.1\r\nConnection: close")
        stream[1].write(request + b"0\r\nAuthorization: b\r\n\r\n")
        assert (await rest_of(stream)).endswith(b"\r\n\r\nconnection host transfer-encoding")


async def test_requests_that_are_sent_ahead_are_answered_in_order() -> None:
    """However they are cut, and however much they are together."""
    async with serving() as port:
        stream = await port.connect()
        long = GET.replace(b"Host: a", b"Host: a\r\nX: " + b"x" * 9000)
        ahead = long * 40
        for at in range(0, len(ahead), 100_000):
            stream[1].write(ahead[at : at + 100_000])
            await asyncio.sleep(0.01)
        for _ in range(40):
            assert b" 200 " in await within(10.0, stream[0].readuntil(b"ok"))


@pytest.mark.parametrize("path", [b"/", b"/slow"])
async def test_too_many_requests_that_are_sent_ahead_end_their_connection(path: bytes) -> None:
    async with serving() as port:
        stream = await port.connect()
        stream[1].write(GET.replace(b"/", path, 1) * 500)
        answers = await rest_of(stream)
        assert answers.count(b" 200 ") <= request_limits.MOST_WAITING + 1
        await ok(await port.connect())


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_a_client_that_reads_no_answer_is_left(
    more: bytes, has_tls: bool, tls: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "STALLED_SECONDS", 0.1)
    identity = tls if has_tls else None
    async with serving(tls=identity) as port:
        stream = await port.connect(tls=identity)
        stream[1].write(b"GET /large HTTP/1.1\r\nHost: a\r\n" + more + b"\r\n")
        await until(lambda: bool(port.served), "it is being served")
        await until(lambda: not port.served, "the server has left")
        assert len(await rest_of(stream)) < LARGE
        await ok(await port.connect(tls=identity))


class Timers:
    """The timers of a loop, which go off when a test says so: so slowly does its client read."""

    def __init__(self) -> None:
        self.have_gone_off = 0
        self._set: list[Timer] = []

    def call_later(self, _seconds: float, callback: Callable[[], None]) -> Timer:
        self._set.append(Timer(callback))
        return self._set[-1]

    def go_off(self) -> None:
        due, self._set = [each for each in self._set if not each.is_cancelled], []
        self.have_gone_off += len(due)
        for each in due:
            each.callback()


class Timer:
    """One of :class:`Timers`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def watch_with(timers: Timers, transport: Any, _loop: asyncio.AbstractEventLoop) -> AnswerWatch:
    """A watch whose time is that of these timers."""
    return AnswerWatch(transport, cast(asyncio.AbstractEventLoop, timers))


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_client_that_reads_slowly_gets_its_answer(
    has_tls: bool, tls: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers()
    monkeypatch.setattr(request_limits, "AnswerWatch", partial(watch_with, timers))
    identity = tls if has_tls else None
    async with serving(tls=identity) as port:
        stream = await port.connect(tls=identity)
        stream[1].write(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await within(10.0, stream[0].readuntil(b"\r\n\r\n"))
        for _ in range(64):
            await within(10.0, stream[0].readexactly(LARGE // 64))
            timers.go_off()
        assert timers.have_gone_off > 32


async def test_clients_that_read_no_answer_count_as_idle(impatient: None) -> None:
    async with serving(most_idle=8) as port:
        for _ in range(20):
            stream = await port.connect()
            stream[1].write(GET.replace(b"/", b"/large", 1))
            await within(10.0, stream[0].readuntil(b"\r\n\r\n"))
        await until(lambda: len(port.served) <= 8, "the greedy have been ended")
        await ok(await port.connect("127.0.0.2"))


async def test_what_is_no_request_is_refused_in_the_form_of_all_errors() -> None:
    async with serving() as port:
        stream = await port.connect()
        stream[1].write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert "Invalid HTTP" in refused(await rest_of(stream), 400)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that gives no connection time to be idle where there are too many."""
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.0)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_many_that_come_at_once_are_all_answered(tls: TlsIdentity, has_tls: bool) -> None:
    """As agents do whose orchestrator has been replaced."""
    identity = tls if has_tls else None
    async with serving(most_idle=4, tls=identity) as port:

        async def come() -> None:
            await ok(await port.connect(tls=identity))

        await asyncio.gather(*(come() for _ in range(100)))


def test_a_connection_has_time_to_be_idle_until_there_are_far_too_many() -> None:
    aborted: list[int] = []
    idle = IdleConnections(most=2, most_at_once=5)
    for number in range(5):
        idle.add(number, "greedy" if number else "other", partial(aborted.append, number))
    assert aborted == []
    idle.add(5, "other", partial(aborted.append, 5))
    assert aborted == [1]
    idle.remove(2)
    idle.add(6, "other", partial(aborted.append, 6))
    assert aborted == [1]


def test_a_connection_that_was_idle_for_long_goes_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, aborted = [0.0], list[int]()
    monkeypatch.setattr(connections, "monotonic", lambda: clock[0])
    idle = IdleConnections(most=2)
    for number in range(4):
        idle.add(number, "a", partial(aborted.append, number))
    clock[0] = connections.PATIENCE_SECONDS
    idle.add(1, "a", partial(aborted.append, 1))  # it has done something since
    assert aborted == [0, 2]
    idle.add(4, "b", partial(aborted.append, 4))
    assert aborted == [0, 2, 3]


async def test_whoever_opens_many_connections_pushes_out_its_own(impatient: None) -> None:
    async with serving(most_idle=8) as port:
        other, greedy = await port.connect("127.0.0.2"), []
        await ok(other)
        for _ in range(20):
            greedy.append(await port.connect())
            await ok(greedy[-1])
        assert [await rest_of(each) for each in greedy[:13]] == [b""] * 13
        await ok(other)
        await ok(greedy[-1])


def hello(tls: TlsIdentity) -> bytes:
    """The first bytes of a client with TLS."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        tls.client.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="allfold").do_handshake()
    return sent.read()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_a_handshake_that_never_ends_is_ended(
    share: float, tls: TlsIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.2)
    async with serving(tls=tls) as port:
        stream = await port.connect()
        begun = hello(tls)
        stream[1].write(begun[: int(share * len(begun))])
        await rest_of(stream)
        await ok(await port.connect(tls=tls))


async def test_whoever_begins_many_handshakes_pushes_out_its_own(
    tls: TlsIdentity, impatient: None
) -> None:
    async with serving(most_idle=8, tls=tls) as port:
        other = await port.connect("127.0.0.2", tls)
        await ok(other)
        greedy = [await port.connect() for _ in range(20)]
        assert [await rest_of(each) for each in greedy[:13]] == [b""] * 13
        await ok(other)
        await ok(await port.connect(tls=tls))


async def test_scrap_instead_of_a_handshake_ends_its_connection_alone(tls: TlsIdentity) -> None:
    async with serving(tls=tls) as port:
        for scrap in (GET, b"\x16\x03\x01\xff\xff" + bytes(70_000), hello(tls) + b"\0" * 100):
            stream = await port.connect()
            stream[1].write(scrap)
            assert not (await rest_of(stream)).startswith(b"HTTP")
        await ok(await port.connect(tls=tls))


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    tls: TlsIdentity,
) -> None:
    async with serving(tls=tls) as port:
        reader, writer = await port.connect()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        secure = tls.client.wrap_bio(incoming, outgoing, server_hostname="allfold")
        with suppress(ssl.SSLWantReadError):
            secure.do_handshake()
        writer.write(outgoing.read())
        is_done = False
        while not is_done:
            incoming.write(await within(10.0, reader.read(65536)))
            with suppress(ssl.SSLWantReadError):
                secure.do_handshake()
                is_done = True
        secure.write(GET)
        writer.write(outgoing.read())
        answer = b""
        while not answer.endswith(b"ok"):
            incoming.write(await within(10.0, reader.read(65536)))
            with suppress(ssl.SSLWantReadError):
                while record := secure.read(65536):
                    answer += record
        assert answer.startswith(b"HTTP/1.1 200")


async def test_a_server_without_descriptors_accepts_as_soon_as_it_has_some(
    tls: TlsIdentity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.05)
    async with serving(tls=tls) as port:
        with socket.socket() as sock:
            with no_descriptors_left():
                sock.connect(port.listener.getsockname())
                await until(lambda: "cannot accept a connection" in caplog.text, "it tried")
            opening = asyncio.open_connection(sock=sock, ssl=tls.client, server_hostname="allfold")
            stream = await within(10.0, opening)
            port.opened.append(stream[1])
            await ok(stream)
