"""The one JSON form of all failures: ``{"error": {"code", "message", "details"}}``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.schema import MESSAGE
from allfold_orchestrator.store.failures import Refusal

log = logging.getLogger(__name__)

MAX_SHOWN = 120


def answer(error: AllfoldError, status: int | None = None) -> JSONResponse:
    """Return the error as an HTTP response."""
    body = MESSAGE.stamp({"error": error.to_dict()})
    return JSONResponse(body, status_code=error.status if status is None else status)


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in the one shape."""
    app.add_exception_handler(AllfoldError, _on_allfold_error)
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_allfold_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AllfoldError)
    return answer(error)


async def _on_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return answer(error.error, error.status)


async def _on_invalid_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return answer(invalid_request(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: unknown paths and methods, broken bodies."""
    assert isinstance(error, HTTPException)
    where = {"method": request.method, "path": request.url.path}
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = answer(LocalError(message, **where), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    """A bug. The log has the traceback; the caller learns the request that failed."""
    log.error("%s %s failed: %r", request.method, request.url.path, error)
    message = f"the orchestrator failed on {request.method} {request.url.path}; see its log"
    return answer(ServiceError(message, cause=type(error).__name__), 500)


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
            # Pydantic says "Value error, ..." and "Input should be ...", or "String should ...".
            expected = re.sub(
                r"^\w+ should\b", "must", problem["msg"].removeprefix("Value error, ")
            )
    return {"field": field, "expected": expected, "got": got}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
