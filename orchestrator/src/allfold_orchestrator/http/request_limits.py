"""Limits that a request must pass before a route sees it: size and time to arrive; and rights."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError
from allfold_orchestrator.store.failures import Refusal
from allfold_service.answers import refusal

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 10.0


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
            await refusal(self._too_large(), 413)(scope, receive, send)
            return
        try:
            await self._app(scope, self._limited(receive), send)
        except _Refused as refused:
            await refusal(refused.error, refused.status)(scope, receive, send)

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


def require_admin(request: Request) -> None:
    """Raise ``Refusal`` (403) unless the request brought the administrator's token."""
    if not request.state.is_admin:
        error = LocalError(
            f"{request.method} {request.url.path}: this needs the administrator's token, the value "
            "of ALLFOLD_ADMIN_TOKEN of the orchestrator; the join token is not enough",
            path=request.url.path,
        )
        raise Refusal(403, error)
