"""Limits that a request must pass before a route sees it: size, time to arrive, and token."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError
from allfold_orchestrator.http.http_errors import answer
from allfold_orchestrator.store.failures import Refusal

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 10.0
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/version"})
OPEN_PREFIX = "/dashboard/"


class BodyLimit:
    """Refuse bodies that are too large, by their announced or their real size, or too slow."""

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
        try:
            await self._app(scope, self._limited(receive), send)
        except _Refused as refused:
            await answer(refused.error, refused.status)(scope, receive, send)

    def _limited(self, receive: Receive) -> Receive:
        """Count a body while it comes: its size may not be announced, its end may never come."""
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise _Refused(_too_slow(received), 408) from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._limit:
                raise _Refused(self._too_large(), 413)
            return message

        return limited

    def _too_large(self) -> InvalidArgument:
        return InvalidArgument(
            f"the body is larger than {self._limit} bytes, which no request needs",
            field="body",
            limit=self._limit,
        )


class _Refused(BaseException):
    """The end of a request by its limits; no handler of the application may catch it."""

    def __init__(self, error: AllfoldError, status: int) -> None:
        self.error = error
        self.status = status


def _too_slow(received: int) -> InvalidArgument:
    return InvalidArgument(
        f"the body did not come within {BODY_SECONDS:g} s: {received} bytes of it were received",
        field="body",
        received=received,
        seconds=BODY_SECONDS,
    )


class TokenGate:
    """Refuse requests without a token, except on the paths of probes and for the dashboard's files.

    Args:
        token: the join token; ``None`` admits everybody.
        admin_token: marks the request as an administrator's, see :func:`require_admin`.
    """

    def __init__(self, app: ASGIApp, token: str | None, admin_token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        self._admin_token = None if admin_token is None else admin_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        brought = _bearer_token(scope)
        is_admin = _is_equal(brought, self._admin_token)
        scope.setdefault("state", {})["is_admin"] = is_admin
        is_open = self._token is None or _is_open(scope["path"])
        if is_open or is_admin or _is_equal(brought, self._token):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await _refuse_link(receive, send)
            return
        response = answer(_no_token(scope), 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


def require_admin(request: Request) -> None:
    """Raise ``Refusal`` (403) unless the request brought the administrator's token."""
    if not request.state.is_admin:
        error = LocalError(
            f"{request.method} {request.url.path}: this needs the administrator's token, the value "
            "of ALLFOLD_ADMIN_TOKEN of the orchestrator; the join token is not enough",
            path=request.url.path,
        )
        raise Refusal(403, error)


def _bearer_token(scope: Scope) -> bytes:
    header: bytes = next((v for name, v in scope["headers"] if name == b"authorization"), b"")
    scheme, _, brought = header.partition(b" ")
    return brought.strip() if scheme.lower() == b"bearer" else b""


async def _refuse_link(receive: Receive, send: Send) -> None:
    """Refuse a WebSocket before it is accepted, which the server answers with 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": "the token is missing or wrong"})


def _is_equal(brought: bytes, token: bytes | None) -> bool:
    return token is not None and hmac.compare_digest(brought, token)


def _no_token(scope: Scope) -> LocalError:
    brought = any(name == b"authorization" for name, _ in scope["headers"])
    what = "the token is not the orchestrator's" if brought else "the request brought no token"
    return LocalError(
        f"{what}; send it as 'Authorization: Bearer <token>', it is the value of ALLFOLD_TOKEN",
        path=scope["path"],
    )
