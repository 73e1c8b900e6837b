"""The control port around its handlers: the token of requests, the form of answers."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from allfold_core.errors import AllfoldError, LocalError
from allfold_core.schema import MESSAGE
from allfold_core.security.tokens import Tokens

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/version"})


class StampedResponse(JSONResponse):
    """A JSON object with the number of its schema, as every answer of the control port."""

    def render(self, content: Any) -> bytes:
        return super().render(MESSAGE.stamp(content))


class Guard:
    """Passes on requests that bring the token. No route of this port reads a body.

    Args:
        tokens: what requests bring as a bearer token; without any, none is asked for.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self._admits(scope):
            error = LocalError("this port needs the join token: Authorization: Bearer <token>")
            await _answer(error, 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if not self._tokens or scope["path"] in OPEN_PATHS:
            return True
        return self._tokens.accept(Headers(scope=scope).get("authorization", ""))


def _answer(error: AllfoldError, status: int) -> StampedResponse:
    return StampedResponse({"error": error.to_dict()}, status_code=status)
