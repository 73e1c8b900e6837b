"""The answers of a service: their form, that of all failures, and the token that they ask for.

A failure is ``{"schema", "error": {"code", "message", "details"}}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.schema import MESSAGE
from allfold_service.credentials import Tokens, no_token
from allfold_service.settings import in_our_words

log = logging.getLogger(__name__)

SCHEMA = "The version of the messages. A newer one than the reader's is refused."
PROBES = frozenset({"/healthz", "/readyz", "/version"})
"""The paths that need no token: those who ask there have none."""
MAX_SHOWN = 120


class Shown(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True, serialize_by_alias=True)


class Answer(Shown):
    """The body of an answer."""

    schema_: int = Field(default=MESSAGE.number, alias="schema", description=SCHEMA)


class ErrorBody(Shown):
    """An error as ``AllfoldError.to_dict`` writes it."""

    code: str = Field(examples=["AF106"])
    message: str
    details: dict[str, Any]


class ErrorAnswer(Answer):
    """Every answer that is not a success."""

    error: ErrorBody


class StampedResponse(JSONResponse):
    """A JSON object with the number of its schema."""

    def render(self, content: Any) -> bytes:
        return super().render(MESSAGE.stamp(content))


def refusal(error: AllfoldError, status: int | None = None) -> StampedResponse:
    """Return the error as an HTTP response."""
    body = {"error": error.to_dict()}
    return StampedResponse(body, error.status if status is None else status)


def answer_errors(app: FastAPI, service: str) -> None:
    """Make ``app`` answer every failure in the one form.

    Args:
        service: what people call it, for the answer to a bug.
    """

    async def report_bug(request: Request, error: Exception) -> JSONResponse:
        """A bug. The log has the traceback; the caller learns the request that failed."""
        log.error("%s failed: %r", _asked(request), error)
        message = f"the {service} failed on {_asked(request)}; see its log"
        return refusal(ServiceError(message, cause=type(error).__name__), 500)

    app.add_exception_handler(AllfoldError, _on_allfold_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, report_bug)


async def _on_allfold_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AllfoldError)
    return refusal(error)


async def _on_invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return refusal(invalid_request(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: unknown paths and methods, broken bodies."""
    assert isinstance(error, HTTPException)
    where = {"method": request.method, "path": request.url.path}
    response = refusal(LocalError(f"{_asked(request)}: {error.detail}", **where), error.status_code)
    response.headers.update(error.headers or {})
    return response


def _asked(request: Request) -> str:
    return f"{request.method} {request.url.path}"


def invalid_request(problems: Sequence[Mapping[str, Any]]) -> InvalidArgument:
    """Return the error that names each wrong field, the expected and the received value."""
    fields = [_field(problem) for problem in problems]
    listed = "; ".join(f"{f['field']}: {f['expected']}, got {f['got']}" for f in fields)
    return InvalidArgument(f"the request is not valid: {listed}", fields=fields)


def _field(problem: Mapping[str, Any]) -> dict[str, str]:
    field, got = ".".join(str(part) for part in problem["loc"]), _shown(problem.get("input"))
    match problem["type"]:
        case "missing":
            expected, got = "a value is required", "nothing"
        case "extra_forbidden":
            expected = "there is no such field"
        case "json_invalid":
            field, expected, got = "body", "must be JSON", _shown(problem["ctx"]["error"])
        case _:
            expected = in_our_words(problem["msg"])
    return {"field": field, "expected": expected, "got": got}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


class TokenGate:
    """Refuses requests without a token, except on the paths that are open.

    Args:
        service: what people call it, for the refusal.
        tokens: the join tokens; without any, everybody is admitted. The state has their name.
        admins: the tokens that mark a request as an administrator's: its state has ``is_admin``.
        is_open: returns True for a path that needs no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: str,
        tokens: Tokens,
        admins: Tokens | None = None,
        is_open: Callable[[str], bool] = PROBES.__contains__,
    ) -> None:
        self._app = app
        self._service = service
        self._tokens = tokens
        self._admins = Tokens() if admins is None else admins
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        brought = Headers(scope=scope).get("authorization", "")
        name = self._tokens.name_of(brought)
        is_known = name is not None
        # The settings refuse a token that is both, but files may come to hold one later on.
        is_admin = not is_known and self._admins.accept(brought)
        scope.setdefault("state", {}).update(is_admin=is_admin, token_name=name or "")
        if not self._tokens or is_admin or is_known or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        response = refusal(no_token(self._service, brought, path=scope["path"]), 401)
        response.headers["WWW-Authenticate"] = "Bearer"
        # Of a WebSocket, too: its server can answer as to any request.
        await response(scope, receive, send)
