"""Puts the parts together into one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from allfold_orchestrator import __version__, api, background, gates, health, http_errors, wire
from allfold_orchestrator.fast_lane import FastLane
from allfold_orchestrator.plan_bodies import PlanBodies
from allfold_orchestrator.redis_client import connect
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store import Store
from allfold_orchestrator.sweeper import Sweeper

DESCRIPTION = """Knows which nodes and ranks are there, and gives every complete group its plan.
It is not on the data path: running jobs do not notice when it is away."""


def create_app(settings: Settings, store: Store | None = None) -> FastAPI:
    """The orchestrator as an ASGI application; ``store`` replaces the one of the settings."""
    app = FastAPI(
        title="Allfold orchestrator",
        version=__version__,
        description=DESCRIPTION,
        lifespan=_lifespan,
        redirect_slashes=False,
        # Their pages load scripts from elsewhere; /openapi.json is all that tools need.
        docs_url=None,
        redoc_url=None,
    )
    memory = store or Store(connect(settings.redis_url), settings.lease_seconds)
    app.state.store = memory
    app.state.orchestrator = Orchestrator(memory, settings.links)
    app.state.plan_bodies = PlanBodies()
    app.state.sweeper = Sweeper(memory, app.state.orchestrator)
    app.state.lease = wire.Lease(
        lease_seconds=settings.lease_seconds, heartbeat_seconds=settings.heartbeat_seconds
    )
    app.include_router(health.router)
    app.include_router(api.router)
    http_errors.install(app)
    app.add_middleware(
        FastLane,
        service=app.state.orchestrator,
        bodies=app.state.plan_bodies,
        lease=app.state.lease,
    )
    app.add_middleware(gates.BodyLimit)
    if settings.token is not None:
        app.add_middleware(gates.TokenGate, token=settings.token.get_secret_value())
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    store: Store = app.state.store
    await store.start()
    sweeper = asyncio.create_task(app.state.sweeper.run(), name="sweeper")
    try:
        yield
    finally:
        store.bells.stop()
        await background.end(sweeper)
        await store.close()
