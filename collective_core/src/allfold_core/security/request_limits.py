"""Limits on the requests of whoever reaches a port: their time, their size, their number.

A server reads a head before it can check a token, and answers before it knows that anybody reads.
So memory and descriptors could be held with requests that never end, or with answers that nobody
takes. uvicorn has no limit on that, and this package does not import uvicorn: :func:`limited`
derives from the protocol that it is given.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from allfold_core.errors import LocalError
from allfold_core.schema import MESSAGE
from allfold_core.security.idle_connections import IdleConnections
from allfold_core.security.stalled_answers import AnswerWatch

HEAD_BYTES = 64 * 1024
_TOO_LARGE = f"the head or the trailer is larger than {HEAD_BYTES} bytes"
# For head and body. A body alone has less in the orchestrator, whose application answers then.
REQUEST_SECONDS = 12.0
# Requests that wait until one before them is answered. Clients that send ahead at all are rare.
MOST_WAITING = 16
_TOO_MANY = f"more than {MOST_WAITING} requests wait for an answer"


def limited(protocol: Any, idle: IdleConnections) -> Any:
    """Return uvicorn's ``HttpToolsProtocol`` with these limits, for one server.

    A head that is too large is answered with 431, a request that takes too long with 408 unless it
    is being answered already; what is no HTTP with 400. Then the connection is closed. It is closed
    without an answer where too many requests wait on it, and where the answers are not read.
    """

    class Limited(protocol):  # type: ignore[misc]
        """A connection; its deadline stands from its opening, and from the start of a request."""

        _deadline: Any = None
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
                idle.remove(self.transport)
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
                idle.remove(self.transport)

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
                idle.add(self.transport, address, self.transport.abort)

        def _watch_the_rest(self) -> None:
            """Watch a connection that closes: it is there until all has been sent."""
            if self.transport.is_closing() and not self._is_lost:
                self._answers.start()

        def _forget(self) -> None:
            self._end_wait()
            self._answers.end()
            idle.remove(self.transport)

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

    return Limited


def _answer(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(MESSAGE.stamp({"error": LocalError(message).to_dict()})).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
