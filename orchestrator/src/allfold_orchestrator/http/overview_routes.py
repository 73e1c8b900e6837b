"""The routes of the overview, for the dashboard and for programs that watch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field

from allfold_control.messages import IncidentReport
from allfold_core.errors import ServiceError
from allfold_core.schema import MESSAGE
from allfold_orchestrator.observation.watch import Watch
from allfold_service.answers import Answer, ErrorAnswer, Shown

Json = dict[str, Any]


class Headline(Shown):
    """The state of everything, for people."""

    mood: Literal["calm", "waiting", "trouble"]
    text: str


class Overview(Answer):
    """Everything at one time, as the store and the agents know it."""

    at: float = Field(description="Seconds since 1970.")
    is_complete: bool = Field(description="False where there are more nodes or groups.")
    headline: Headline
    nodes: list[Json] = Field(
        description="As /v1/nodes has them, with what their agents say: problem is why there is "
        "no answer, groups has the ranks by group; and with their traffic."
    )
    groups: list[Json] = Field(
        description="As /v1/groups has them, each with a sentence, the drawing of its links, its "
        "last op, figures, stragglers (the slowest rank first), and series (a point per second)."
    )
    ops: list[Json] = Field(description="Collectives in flight, oldest first, with a sentence.")
    messages: list[Json] = Field(description="Sends and receives that wait, with a sentence.")
    incidents: list[IncidentReport] = Field(description="As /v1/incidents has them.")


Since = Annotated[
    float,
    Query(
        ge=0, allow_inf_nan=False, description="Points of charts after this, seconds since 1970."
    ),
]
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is not valid."},
    503: {"model": ErrorAnswer, "description": "The state store does not answer: try again."},
    "default": {"model": ErrorAnswer, "description": "Any other failure: no token, a bug."},
}
_NO_STORE = {"Cache-Control": "no-store"}

router = APIRouter(prefix="/v1/overview", tags=["overview"])


@router.get("", summary="Show everything at once", response_model=Overview, responses=_ERRORS)
async def overview(request: Request, since: Since = 0.0) -> Response:
    """Return nodes, groups, ops in flight, incidents and charts, as the agents report them now.

    The agents are asked at most once a second, however many ask this. One that does not answer has
    the reason as its ``problem``.
    """
    watch: Watch = request.app.state.watch
    return JSONResponse(MESSAGE.stamp(await watch.overview(since)), headers=_NO_STORE)


@router.get(
    "/events",
    summary="Watch everything",
    response_class=StreamingResponse,
    responses={
        **_ERRORS,
        200: {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "An event 'overview' with the JSON of /v1/overview, or 'problem' with "
            "that of an error, once a second.",
        },
    },
)
async def events(request: Request, since: Since = 0.0) -> StreamingResponse:
    """Return server-sent events; after the first one the charts have only their new points."""
    watch: Watch = request.app.state.watch
    watch.check_has_place()
    headers = {**_NO_STORE, "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(watch, since), media_type="text/event-stream", headers=headers)


async def _stream(watch: Watch, since: float) -> AsyncIterator[str]:
    async with aclosing(watch.overviews(since)) as overviews:
        async for found in overviews:
            yield _event(found)


def _event(found: dict[str, Any] | ServiceError) -> str:
    if isinstance(found, ServiceError):
        return f"event: problem\ndata: {json.dumps({'error': found.to_dict()})}\n\n"
    return f"event: overview\ndata: {json.dumps(found)}\n\n"
