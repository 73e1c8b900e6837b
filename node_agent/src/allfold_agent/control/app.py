"""The control port's application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from allfold_agent import __version__
from allfold_agent.agent import Agent
from allfold_agent.control.facts import add_facts
from allfold_agent.control.health import add_health
from allfold_agent.control.metrics import add_metrics
from allfold_agent.control.peer_checks import add_peer_checks
from allfold_agent.control.status import add_flight, add_status
from allfold_agent.http.guard import Guard, StampedResponse
from allfold_core.errors import AllfoldError, InvalidArgument, LocalError, ServiceError
from allfold_core.schema import MESSAGE


class ErrorBody(BaseModel):
    """An error as ``AllfoldError.to_dict`` writes it."""

    code: str = Field(examples=["AF106"])
    message: str
    details: dict[str, Any]


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    schema_: int = Field(default=MESSAGE.number, alias="schema")
    error: ErrorBody


_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "A failure; the status is its class's."}
}


def make_app(agent: Agent) -> FastAPI:
    """The control port's application for one agent."""
    app = FastAPI(
        title="Allfold node agent",
        version=__version__,
        default_response_class=StampedResponse,
        responses=_ERRORS,
        # Their pages load scripts from elsewhere; /openapi.json is all that tools need.
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, tokens=agent.settings.credentials.tokens)
    _add_errors(app)
    add_health(app, agent)
    add_status(app, agent)
    add_facts(app, agent)
    add_peer_checks(app, agent)
    add_metrics(app, agent)
    add_flight(app, agent)
    return app


def _error(error: AllfoldError, status: int | None = None) -> StampedResponse:
    return StampedResponse({"error": error.to_dict()}, status_code=status or error.status)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AllfoldError)
    async def refuse(_: Request, error: AllfoldError) -> StampedResponse:
        return _error(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> StampedResponse:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error(InvalidArgument(f"{place}: {first['msg']}, got {first.get('input')!r}"))

    @app.exception_handler(HTTPException)
    async def refuse_request(request: Request, error: HTTPException) -> StampedResponse:
        """Starlette's own refusals: unknown paths and methods, broken bodies."""
        answer = _error(LocalError(f"{_asked(request)}: {error.detail}"), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def report_bug(request: Request, error: Exception) -> StampedResponse:
        """A bug. The log has the traceback; the caller learns the request that failed."""
        message = f"the node agent failed on {_asked(request)}; see its log"
        return _error(ServiceError(message, cause=type(error).__name__), 500)


def _asked(request: Request) -> str:
    return f"{request.method} {request.url.path}"
