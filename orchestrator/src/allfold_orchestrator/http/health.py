"""The routes of probes: liveness, readiness, version."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from allfold_core.errors import ServiceError
from allfold_orchestrator import __version__, wire
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import Sweeper

PING_SECONDS = 1.0

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Liveness of the process")
async def healthz() -> wire.Alive:
    """Answer without the store: its loss is no reason to restart the orchestrator."""
    return wire.Alive()


@router.get(
    "/readyz",
    summary="Readiness to serve requests",
    responses={503: {"model": wire.Readiness, "description": "Not ready; the checks say why."}},
)
async def readyz(request: Request, response: Response) -> wire.Readiness:
    """Return every check with its reason."""
    state = request.app.state
    checks = [await _store_check(state.store), _sweeper_check(state.sweeper)]
    ready = all(check.ok for check in checks)
    response.status_code = 200 if ready else 503
    return wire.Readiness(ready=ready, checks=checks)


@router.get("/version", summary="Name and version of the service")
async def version() -> wire.Version:
    """Return name and version."""
    return wire.Version(service="allfold-orchestrator", version=__version__)


async def _store_check(store: Store) -> wire.Check:
    try:
        async with asyncio.timeout(PING_SECONDS):
            await store.ping()
    except ServiceError:
        # Probes bring no token: where the store is, and why it fails, is for the log.
        reason = "the state store does not answer; the log says why"
        return wire.Check(name="store", ok=False, reason=reason)
    except TimeoutError:
        reason = f"the state store did not answer within {PING_SECONDS:g} s"
        return wire.Check(name="store", ok=False, reason=reason)
    return wire.Check(name="store", ok=True, reason="the state store answers")


def _sweeper_check(sweeper: Sweeper) -> wire.Check:
    problem = sweeper.problem
    return wire.Check(name="sweeper", ok=problem is None, reason=problem or "leases are watched")
