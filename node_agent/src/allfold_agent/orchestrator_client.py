"""What the agent asks of the orchestrator; it retries, because start order must not matter."""

from __future__ import annotations

import asyncio
import logging
import random
from time import monotonic
from typing import Any

import httpx

from allfold_core.errors import AllfoldError, OrchestratorUnreachable, ServiceError, from_dict

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class Forgotten(Exception):
    """The orchestrator does not know what it was asked about, e.g. after it lost its state."""


def _error_in(body: Any) -> AllfoldError | None:
    """The error that a body carries; a gateway in between may answer anything."""
    error = body.get("error") if isinstance(body, dict) else None
    return from_dict(error) if isinstance(error, dict) and "code" in error else None


class OrchestratorClient:
    """JSON over HTTP with one error seam: what comes out is data or an :class:`AllfoldError`."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # A proxy of the environment is not meant for the services of one job.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=5.0, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self, method: str, path: str, *, timeout: float = 5.0, **request: Any
    ) -> dict[str, Any]:
        """One request.

        Raises:
            OrchestratorUnreachable: no answer, or none that the orchestrator would give.
            Forgotten: it does not know what was asked about.
            AllfoldError: what the orchestrator answered instead.
        """
        try:
            response = await self._http.request(method, path, timeout=timeout, **request)
            body = response.json() if response.content else {}
        except (httpx.HTTPError, ValueError) as error:
            raise OrchestratorUnreachable(
                f"the orchestrator at {self.url} does not answer: {error or type(error).__name__}"
            ) from error
        refusal = _error_in(body) if response.is_error else None
        if not isinstance(body, dict) or (response.is_error and refusal is None):
            raise OrchestratorUnreachable(
                f"{self.url} answered {response.status_code} to {method} {path}: "
                "is this an Allfold orchestrator?"
            )
        if refusal is None:
            return body
        if response.status_code == httpx.codes.NOT_FOUND:
            raise Forgotten(refusal.message)
        raise refusal

    async def persist(
        self, method: str, path: str, *, deadline: float, **request: Any
    ) -> dict[str, Any]:
        """Like :meth:`call`, again until ``deadline`` (monotonic) while it is unreachable."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self.call(method, path, **request)
            except ServiceError as error:
                if monotonic() + pause > deadline:
                    raise
                log.debug("trying again: %s", error)
            # Jitter, so that a thousand agents do not come back in step.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
