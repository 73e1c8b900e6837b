"""The ASGI application, made of the parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from allfold_orchestrator import __version__, background, wire
from allfold_orchestrator.http import (
    api,
    dashboard,
    health,
    http_errors,
    link_route,
    metrics,
    overview_routes,
    request_limits,
)
from allfold_orchestrator.http.metrics import Metrics
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.http.request_times import CountRequests
from allfold_orchestrator.links.control_links import ControlLinks
from allfold_orchestrator.observation.watch import Watch
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import Sweeper

DESCRIPTION = """Registers nodes and ranks, and gives every complete group its plan.
It is not on the data path: running jobs do not notice when it is down."""

BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="The join token, the value of ALLFOLD_TOKEN; or the administrator's, of "
    "ALLFOLD_ADMIN_TOKEN.",
)


def create_app(settings: Settings, store: Store | None = None) -> FastAPI:
    """Return the orchestrator as an ASGI application; ``store`` overrides the settings'."""
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
    memory = store or Store(
        connect(settings.redis_url, settings.redis_password_file), settings.lease_seconds
    )
    app.state.store = memory
    app.state.orchestrator = Orchestrator(memory, settings.links)
    app.state.plan_bodies = PlanBodies()
    app.state.links = ControlLinks(memory, app.state.orchestrator)
    app.state.sweeper = Sweeper(memory, app.state.orchestrator, app.state.links.doubt)
    app.state.watch = Watch(app.state.orchestrator, settings.credentials)
    links, sweeper, tls = app.state.links, app.state.sweeper, settings.credentials.tls
    found = Metrics(memory, app.state.orchestrator, links, sweeper, tls)
    app.state.metrics = found
    tokens = settings.credentials.tokens
    app.state.needs_token = bool(tokens)
    app.state.lease = wire.Lease(
        lease_seconds=settings.lease_seconds, heartbeat_seconds=settings.heartbeat_seconds
    )
    app.include_router(health.router)
    app.include_router(link_route.router)
    app.include_router(dashboard.router)
    # TokenGate has checked the token before; this puts the scheme into the document of the API.
    scheme = [Security(BEARER)] if tokens else []
    app.include_router(api.router, dependencies=scheme)
    app.include_router(overview_routes.router, dependencies=scheme)
    app.include_router(metrics.router, dependencies=scheme)
    http_errors.install(app)
    app.add_middleware(request_limits.BodyLimit)
    app.add_middleware(request_limits.TokenGate, tokens=tokens, admins=settings.admins)
    app.add_middleware(CountRequests, times=found.requests)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    store: Store = app.state.store
    await store.start()
    sweeper = asyncio.create_task(app.state.sweeper.run(), name="sweeper")
    links = asyncio.create_task(app.state.links.run(), name="control links")
    lag = asyncio.create_task(app.state.metrics.watch_lag(), name="loop lag")
    try:
        yield
    finally:
        store.notifications.stop()
        app.state.watch.stop()
        app.state.links.close()
        await background.end(lag)
        await background.end(links)
        await background.end(sweeper)
        await app.state.watch.close()
        await store.close()
