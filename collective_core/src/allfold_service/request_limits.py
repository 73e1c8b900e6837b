"""Limits on the requests of whoever reaches a port: their time, their size, their number.

A server reads a head before it can check a token, and answers before it knows that anybody reads.
So memory and descriptors could be held with requests that never end, or with answers that nobody
takes. uvicorn has no limit on that.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from allfold_core.errors import LocalError
from allfold_core.schema import MESSAGE
from allfold_service.connections import IdleConnections

HEAD_BYTES = 64 * 1024
_TOO_LARGE = f"the head or the trailer is larger than {HEAD_BYTES} bytes"
# For head and body. A body alone has less in the orchestrator, whose application answers then.
REQUEST_SECONDS = 12.0
# Requests that wait until one before them is answered. Clients that send ahead at all are rare.
MOST_WAITING = 16
_TOO_MANY = f"more than {MOST_WAITING} requests wait for an answer"
# An answer may take as long as it likes where each such time takes some of it away.
STALLED_SECONDS = 12.0
# tcpi_bytes_acked of struct tcp_info, Linux include/uapi/linux/tcp.h
_ACKED = struct.Struct("=120xQ")


def limited(idle: IdleConnections) -> type[HttpToolsProtocol]:
    """Return the protocol of the connections of one server, with these limits."""
    return type("Limited", (_Limited,), {"idle": idle})


class _Limited(HttpToolsProtocol):
    """A connection; its deadline stands from its opening, and from the start of a request.

    A head that is too large is answered with 431, a request that takes too long with 408 unless it
    is being answered already; what is no HTTP with 400. Then the connection is closed. It is closed
    without an answer where too many requests wait on it, and where the answers are not read.
    """

    idle: ClassVar[IdleConnections]
    _deadline: asyncio.TimerHandle | None = None
    _is_lost = False
    _is_in_head = False
    # Bytes without a beginning, an end or a part of a body among them: of a head or a trailer.
    _unparsed = 0
    _has_parsed = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._answers = AnswerWatch(transport, self.loop)
        self._await_request()
        self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_parsed = False
        super().data_received(data)
        self._unparsed = 0 if self._has_parsed else self._unparsed + len(data)
        if self._unparsed > HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_request()
        self._is_in_head = self._has_parsed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)
        # else it is of a trailer, which nobody reads

    def on_headers_complete(self) -> None:
        self._is_in_head, self._has_parsed = False, True
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES:
            self._refuse(431, _TOO_LARGE)
            raise ValueError(_TOO_LARGE)  # the parser ends with it
        if len(self.pipeline) >= MOST_WAITING:
            self._refuse(429, _TOO_MANY)
            raise ValueError(_TOO_MANY)
        if not self.flow.write_paused:
            self.idle.remove(self.transport)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_parsed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_parsed = True
        self._end_wait()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        self._note_idle()
        self._watch_the_rest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_idle()
        self._answers.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._answers.end()
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle.remove(self.transport)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_the_rest()

    def handle_websocket_upgrade(self) -> None:
        self._forget()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _note_idle(self) -> None:
        if not self._is_lost:
            address = self.client[0] if self.client else ""
            self.idle.add(self.transport, address, self.transport.abort)

    def _watch_the_rest(self) -> None:
        """Watch a connection that closes: it is there until all has been sent."""
        if self.transport.is_closing() and not self._is_lost:
            self._answers.start()

    def _forget(self) -> None:
        self._end_wait()
        self._answers.end()
        self.idle.remove(self.transport)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self._be_late)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _be_late(self) -> None:
        self._refuse(408, f"no whole request came within {REQUEST_SECONDS:g} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_answer(HTTPStatus(status), message))
        self.transport.close()
        self._watch_the_rest()


class AnswerWatch:
    """Aborts a connection on which nothing of an answer arrives for :data:`STALLED_SECONDS`.

    asyncio waits forever: while its buffer is full, and when it closes a connection.

    Args:
        transport: of TCP, with or without TLS.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._arrived = 0

    def start(self) -> None:
        """Look from now on, unless this watch does already."""
        if self._timer is None:
            self._arrived = self._count()
            self._wait()

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(STALLED_SECONDS, self._look)

    def _look(self) -> None:
        before, self._arrived = self._arrived, self._count()
        if self._arrived > before:
            self._wait()
        else:
            self._transport.abort()

    def _count(self) -> int:
        """Return a number that grows with each byte that arrives, whatever counts it.

        With TLS nobody but the kernel does: asyncio's buffer is below the one that it shows.
        """
        connected = self._transport.get_extra_info("socket")
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size)
        acked: int = _ACKED.unpack(info)[0] if len(info) == _ACKED.size else 0
        return acked - int(self._transport.get_write_buffer_size())


def _answer(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(MESSAGE.stamp({"error": LocalError(message).to_dict()})).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
