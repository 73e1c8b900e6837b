"""``GET /metrics``: what Prometheus reads; and the agents that it is to read."""

from __future__ import annotations

import asyncio
import platform
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_core.errors import ServiceError
from allfold_core.incident import Cause, merged
from allfold_core.survival.suspicion import RecentMaximum
from allfold_orchestrator import __version__, bodies
from allfold_orchestrator.http import catalogue
from allfold_orchestrator.links.control_links import ControlLinks
from allfold_orchestrator.membership.admission import TokenLimit
from allfold_orchestrator.membership.nodes import REASONS
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store
from allfold_orchestrator.sweeper import Sweeper
from allfold_service.answers import ErrorAnswer
from allfold_service.metrics import CONTENT_TYPE, Exposition, Histogram, Values
from allfold_service.tls import TlsIdentity

OTHER = "other"
"""The route of requests that no route serves, or that were refused before one was looked for."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BOUNDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)


class RequestTimes:
    """The requests so far.

    Attributes:
        counts: by method, route and status.
        seconds: by route.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(partial(Histogram, _BOUNDS))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        known = method if method in _METHODS else OTHER
        self.counts[known, route, str(status)] += 1
        self.seconds[route].observe(seconds)


class CountRequests:
    """Around everything else, so that it sees requests that are refused, too."""

    def __init__(self, app: ASGIApp, times: RequestTimes) -> None:
        self._app = app
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            self._times.observe(scope["method"], route, status, perf_counter() - began)


# Prometheus gives up after 10 s by default; without the store the rest is served in time.
STORE_SECONDS = 3.0
_LAG_TICK_SECONDS = 0.25
_LAG_SECONDS = 15.0
_LATEST_INCIDENTS = 1000
_MOST_SENTENCES = 64

_NODE_STATES = "alive", "late", "gone"
_PHASES = "forming", "ready", "reduced", "recalled", "gone", "unreadable"

router = APIRouter(tags=["health"])


@dataclass
class Stored:
    """One look at the store."""

    generation: int = 0
    nodes: list[bodies.NodeView] = field(default_factory=list)
    groups: list[bodies.GroupView] = field(default_factory=list)
    tokens: list[TokenLimit] = field(default_factory=list)


class Metrics:
    """The metrics of one replica.

    Attributes:
        requests: counts those of HTTP.
    """

    def __init__(
        self,
        store: Store,
        orchestrator: Orchestrator,
        links: ControlLinks,
        sweeper: Sweeper,
        tls: TlsIdentity | None,
    ) -> None:
        self._tls = tls
        self.requests = RequestTimes()
        self._store = store
        self._orchestrator = orchestrator
        self._links = links
        self._sweeper = sweeper
        self._lag = RecentMaximum(_LAG_SECONDS)
        self._values = Values(catalogue.CATALOGUE)
        self._exposition = Exposition(catalogue.CATALOGUE, lambda: self._values)

    async def text(self) -> bytes:
        """Look at everything, and return what is to be served."""
        stored, incidents = None, None
        # Without the store, what is in it has no series.
        with suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(STORE_SECONDS):
                stored = await self._read()
        with suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(STORE_SECONDS):
                incidents = await self._orchestrator.incidents.latest(_LATEST_INCIDENTS)
        values = self._values = Values(catalogue.CATALOGUE)
        self._look_at_process(values)
        is_up = stored is not None and self._sweeper.problem is None
        values.put(catalogue.STORE_UP, is_up)
        if stored is not None:
            _look_at_stored(values, stored)
        self._look_at_incidents(values, incidents or ())
        return self._exposition.text()

    async def watch_lag(self) -> None:
        """Note how late the event loop is, until cancelled."""
        while True:
            due = monotonic() + _LAG_TICK_SECONDS
            await asyncio.sleep(_LAG_TICK_SECONDS)
            now = monotonic()
            self._lag.note(now, max(0.0, now - due))

    async def _read(self) -> Stored:
        service = self._orchestrator
        return Stored(
            (await self._store.lives.read()).generation,
            [each async for each in all_nodes(service)],
            [each async for each in _all_groups(service)],
            await self._store.limits.of_tokens(),
        )

    def _look_at_process(self, values: Values) -> None:
        store = "embedded" if self._store.is_embedded else "redis"
        values.put(catalogue.BUILD, 1, __version__, platform.python_version(), store)
        if self._tls is not None:
            values.put(catalogue.CERTIFICATE_END, self._tls.expires)
        values.observe(catalogue.STORE_SECONDS, self._store.times.seconds)
        values.put(catalogue.STORE_FAILURES, self._store.times.failures)
        values.put(catalogue.LINKS, self._links.count)
        values.put(catalogue.LAG, self._lag.at(monotonic()))
        for reason in REASONS:
            values.put(catalogue.NODES_ENDED, self._store.nodes.ended[reason], reason)
        for labels, count in self.requests.counts.items():
            values.put(catalogue.REQUESTS, count, *labels)
        for route, seconds in self.requests.seconds.items():
            values.observe(catalogue.REQUEST_SECONDS, seconds, route)

    def _look_at_incidents(self, values: Values, latest: Sequence[dict[str, Any]]) -> None:
        found = self._orchestrator.incidents.found
        for cause in Cause:
            values.put(catalogue.INCIDENTS_TOTAL, found[cause.value], cause.value)
        for each in latest:
            is_open = each["ended"] is None
            values.add(catalogue.INCIDENTS, is_open, each["cause"], each["effect"])
        lasting = [each for each in merged(latest) if each.is_open]
        for incident in lasting[-_MOST_SENTENCES:]:
            values.put(
                catalogue.INCIDENT_INFO,
                1,
                incident.cause.value,
                incident.effect.value,
                incident.group,
                str(incident.culprit),
                incident.sentence,
            )


async def all_nodes(service: Orchestrator) -> AsyncIterator[bodies.NodeView]:
    """Yield every node that is here, or was within the last hour."""
    after: str | None = ""
    while after is not None:
        page = await service.nodes(after, bodies.MAX_PAGE)
        for each in page.nodes:
            yield each
        after = page.next


async def _all_groups(service: Orchestrator) -> AsyncIterator[bodies.GroupView]:
    after: str | None = ""
    while after is not None:
        page = await service.groups(after, bodies.MAX_PAGE)
        for each in page.groups:
            yield each
        after = page.next


def _look_at_stored(values: Values, stored: Stored) -> None:
    values.put(catalogue.GENERATION, stored.generation)
    states = Counter[str](node.state for node in stored.nodes)
    for state in _NODE_STATES:
        values.put(catalogue.NODES, states[state], state)
    values.put(catalogue.NODES_DRAINING, sum(each.draining for each in _present(stored.nodes)))
    for node in _present(stored.nodes):
        values.put(catalogue.HEARTBEAT_AGE, node.heartbeat_age or 0.0, node.node)
    phases = Counter[str](group.phase for group in stored.groups)
    for phase in _PHASES:
        values.put(catalogue.GROUPS, phases[phase], phase)
    missing = sum(len(each.missing) for each in stored.groups if each.phase == "forming")
    values.put(catalogue.RANKS_MISSING, missing)
    for each in stored.tokens:
        for kind, most, count in each.kinds:
            values.put(catalogue.TOKEN_OPEN, count, each.token, kind)
            if most is not None:
                values.put(catalogue.TOKEN_LIMIT, most, each.token, kind)


def _present(nodes: Sequence[bodies.NodeView]) -> list[bodies.NodeView]:
    return [node for node in nodes if node.state != "gone"]


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        "default": {"model": ErrorAnswer, "description": "Any failure: no token, a bug."},
    },
)
async def metrics(request: Request) -> Response:
    """Return the metrics of this replica; docs/metrics.md has all of them."""
    found: Metrics = request.app.state.metrics
    return Response(await found.text(), media_type=CONTENT_TYPE)
