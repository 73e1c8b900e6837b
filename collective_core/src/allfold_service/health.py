"""The routes of probes: liveness, readiness, version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import APIRouter, Response

from allfold_service.answers import Answer, Shown


class Liveness(Answer):
    """The answer of a process that runs."""

    status: Literal["ok"] = "ok"


class Check(Shown):
    """One condition of readiness."""

    name: str
    ok: bool
    reason: str


class Readiness(Answer):
    """The readiness to serve requests, with every check."""

    ready: bool
    checks: list[Check]


def probes(about: Answer, check: Callable[[], Awaitable[list[Check]]]) -> APIRouter:
    """Return the routes of probes, which need no token.

    Args:
        about: the answer with the name and the version of the service.
        check: returns every condition of readiness as it is now.
    """
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="Liveness of the process")
    async def healthz() -> Liveness:
        """Answer while the process lives; that others do not is no reason to restart it."""
        return Liveness()

    @router.get(
        "/readyz",
        summary="Readiness to serve requests",
        responses={503: {"model": Readiness, "description": "Not ready; the checks say why."}},
    )
    async def readyz(response: Response) -> Readiness:
        """Return every check with its reason; status 503 unless all are met."""
        checks = await check()
        ready = all(each.ok for each in checks)
        response.status_code = 200 if ready else 503
        return Readiness(ready=ready, checks=checks)

    @router.get("/version", summary="Name and version of the service", response_model=type(about))
    async def version() -> Answer:
        """Return name and version."""
        return about

    return router
