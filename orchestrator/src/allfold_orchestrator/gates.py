"""What a request must pass before anything looks at it: its size and its token."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import InvalidArgument, LocalError
from allfold_orchestrator.http_errors import answer

MAX_BODY_BYTES = 1 << 20
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/version"})


class BodyLimit:
    """Refuses bodies over the limit: by their announced size, or as soon as they exceed it."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced) > self._limit:
            await answer(self._too_large(), 413)(scope, receive, send)
            return
        await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Bodies without an announced size are counted while they come."""
        received = 0

        async def counting() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise _TooLarge
            return message

        try:
            await self._app(scope, counting, send)
        except _TooLarge:
            await answer(self._too_large(), 413)(scope, receive, send)

    def _too_large(self) -> InvalidArgument:
        return InvalidArgument(
            f"the body is larger than {self._limit} bytes, which no request needs",
            field="body",
            limit=self._limit,
        )


class _TooLarge(BaseException):
    """Must reach the gate through every handler in between."""


class TokenGate:
    """Lets nobody in without the token, but for the paths that probes use."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        response = answer(_no_token(scope), 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _admits(self, scope: Mapping[str, list[tuple[bytes, bytes]]]) -> bool:
        header = next((v for name, v in scope["headers"] if name == b"authorization"), b"")
        scheme, _, brought = header.partition(b" ")
        return hmac.compare_digest(brought.strip(), self._token) and scheme.lower() == b"bearer"


def _no_token(scope: Scope) -> LocalError:
    brought = any(name == b"authorization" for name, _ in scope["headers"])
    what = "the token is not the orchestrator's" if brought else "the request brought no token"
    return LocalError(
        f"{what}; send it as 'Authorization: Bearer <token>', it is the value of ALLFOLD_TOKEN",
        path=scope["path"],
    )
