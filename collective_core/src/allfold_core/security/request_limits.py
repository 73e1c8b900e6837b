"""Limits on requests that are not complete: on their time, the size of their heads, their number.

A server reads a head before it can check a token, so whoever reaches a port could hold memory and
descriptors with requests that never end. uvicorn has no limit on that, and this package does not
import uvicorn: :func:`limited` derives from the protocol that it is given.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from allfold_core.errors import LocalError
from allfold_core.schema import MESSAGE
from allfold_core.security.idle_connections import IdleConnections

HEAD_BYTES = 64 * 1024
_TOO_LARGE = f"the head is larger than {HEAD_BYTES} bytes"
# For head and body. A body alone has less in the orchestrator, whose application answers then.
REQUEST_SECONDS = 12.0


def limited(protocol: Any, idle: IdleConnections) -> Any:
    """Return uvicorn's ``HttpToolsProtocol`` with these limits, for one server.

    A head that is too large is answered with 431, a request that takes too long with 408 unless it
    is being answered already; what is no HTTP with 400. Then the connection is closed.
    """

    class Limited(protocol):  # type: ignore[misc]
        """A connection; its deadline stands from its opening, and from the start of a request."""

        _deadline: Any = None
        _is_in_head = False
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()
            self._note_idle()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            was_in_head = self._is_in_head
            super().data_received(data)
            if was_in_head and self._is_in_head:
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES:
                    self._refuse(431, _TOO_LARGE)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_request()
            self._is_in_head, self._head_bytes = True, 0

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > HEAD_BYTES:
                self._refuse(431, _TOO_LARGE)
                raise ValueError(_TOO_LARGE)  # the parser ends with it
            idle.remove(self.transport)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._end_wait()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._note_idle()

        def handle_websocket_upgrade(self) -> None:
            self._forget()
            super().handle_websocket_upgrade()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, msg)

        def _note_idle(self) -> None:
            address = self.client[0] if self.client else ""
            idle.add(self.transport, address, self.transport.abort)

        def _forget(self) -> None:
            self._end_wait()
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

    return Limited


def _answer(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(MESSAGE.stamp({"error": LocalError(message).to_dict()})).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
