"""Counts and times HTTP requests by their route."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allfold_service.metrics import Histogram

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

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        known = method if method in _METHODS else OTHER
        self.counts[known, route, str(status)] += 1
        self.seconds[route].note(seconds)


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
            self._times.note(scope["method"], route, status, perf_counter() - began)
