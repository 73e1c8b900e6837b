"""The ASGI application, made of the parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from allfold_control.messages import MAX_MESSAGE_BYTES
from allfold_core.errors import ServiceError
from allfold_orchestrator import __version__, background, bodies
from allfold_orchestrator.http import (
    api,
    dashboard,
    limit_routes,
    link_route,
    metrics,
    overview_routes,
    request_limits,
)
from allfold_orchestrator.http.metrics import CountRequests, Metrics
from allfold_orchestrator.http.plan_bodies import PlanBodies
from allfold_orchestrator.links.control_links import ControlLinks
from allfold_orchestrator.observation.watch import Watch
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.settings import Settings
from allfold_orchestrator.store.failures import Refusal
from allfold_orchestrator.store.redis_client import connect
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import Sweeper
from allfold_service.answers import PROBES, TokenGate, answer_errors, refusal
from allfold_service.health import Check, probes
from allfold_service.server import Server
from allfold_service.tls import TlsIdentity

DESCRIPTION = """Registers nodes and ranks, and gives every complete group its plan.
It is not on the data path: running jobs do not notice when it is down."""

GRACEFUL_SECONDS = 1
# Longer than any pause between an agent's requests, so that they reuse one connection.
KEEP_ALIVE_SECONDS = 75
PING_SECONDS = 1.0
OPEN_PATHS = PROBES | {"/"}

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
    app.state.lease = bodies.Lease(
        lease_seconds=settings.lease_seconds, heartbeat_seconds=settings.heartbeat_seconds
    )
    app.include_router(_probes(app))
    app.include_router(link_route.router)
    app.include_router(dashboard.router)
    # TokenGate has checked the token before; this puts the scheme into the document of the API.
    scheme = [Security(BEARER)] if tokens else []
    app.include_router(api.router, dependencies=scheme)
    app.include_router(limit_routes.router, dependencies=scheme)
    app.include_router(overview_routes.router, dependencies=scheme)
    app.include_router(metrics.router, dependencies=scheme)
    answer_errors(app, "orchestrator")
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_middleware(request_limits.BodyLimit)
    app.add_middleware(
        TokenGate,
        service="orchestrator",
        tokens=tokens,
        admins=settings.admins,
        is_open=_is_open,
    )
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


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/dashboard/")


async def _on_refusal(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return refusal(error.error, error.status)


def _probes(app: FastAPI) -> APIRouter:
    async def checks() -> list[Check]:
        return [await _store_check(app.state.store), _sweeper_check(app.state.sweeper)]

    return probes(bodies.Version(service="allfold-orchestrator", version=__version__), checks)


async def _store_check(store: Store) -> Check:
    try:
        async with asyncio.timeout(PING_SECONDS):
            await store.ping()
    except ServiceError:
        # Probes bring no token: where the store is, and why it fails, is for the log.
        reason = "the state store does not answer; the log says why"
        return Check(name="store", ok=False, reason=reason)
    except TimeoutError:
        reason = f"the state store did not answer within {PING_SECONDS:g} s"
        return Check(name="store", ok=False, reason=reason)
    return Check(name="store", ok=True, reason="the state store answers")


def _sweeper_check(sweeper: Sweeper) -> Check:
    problem = sweeper.problem
    return Check(name="sweeper", ok=problem is None, reason=problem or "leases are watched")


def web_sockets() -> dict[str, Any]:
    """Return uvicorn's options for control links: agents beat, so it need not ping them."""
    return {
        "ws": "websockets-sansio",
        "ws_max_size": MAX_MESSAGE_BYTES,
        "ws_ping_interval": None,
    }


def make_server(app: FastAPI, tls: TlsIdentity | None, on_ready: Callable[[], None]) -> Server:
    """Return the server of an orchestrator's application."""

    def on_stop() -> None:
        app.state.store.notifications.stop()
        app.state.watch.stop()

    return Server(
        app,
        tls,
        keep_alive=KEEP_ALIVE_SECONDS,
        graceful=GRACEFUL_SECONDS,
        on_ready=on_ready,
        on_stop=on_stop,
        **web_sockets(),
    )
