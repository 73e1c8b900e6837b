"""The control port around its handlers: the token and the size of requests, the form of answers."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError
from allfold_core.schema import MESSAGE

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/version"})
MAX_BODY_BYTES = 1 << 20


class StampedResponse(JSONResponse):
    """A JSON object with the number of its schema, as every answer of the control port."""

    def render(self, content: Any) -> bytes:
        return super().render(MESSAGE.stamp(content))


class Guard:
    """Passes on requests that bring the token and have a small body.

    Args:
        token: what requests bring as a bearer token; with an empty one, none is asked for.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._admits(scope):
            error = LocalError("this port needs the join token: Authorization: Bearer <token>")
            await _answer(error, 401)(scope, receive, send)
        elif (body := await _body(scope, receive)) is None:
            error = InvalidArgument(f"the body has more than {MAX_BODY_BYTES} bytes")
            await _answer(error, 413)(scope, receive, send)
        else:
            await self._app(scope, _replayed(body, receive), send)

    def _admits(self, scope: Scope) -> bool:
        if not self._token or scope["path"] in OPEN_PATHS:
            return True
        given = Headers(scope=scope).get("authorization", "").encode()
        return hmac.compare_digest(given, self._expected)


def _answer(error: AllfoldError, status: int) -> StampedResponse:
    return StampedResponse({"error": error.to_dict()}, status_code=status)


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """Return the whole body, ``None`` as soon as it is too long, announced or not."""
    announced = Headers(scope=scope).get("content-length", "0")
    if not announced.isdecimal() or int(announced) > MAX_BODY_BYTES:
        return None
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
