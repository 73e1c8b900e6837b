"""The time of leases. All replicas use the store's clock, so theirs need not agree."""

from __future__ import annotations

import time
from typing import Protocol

from allfold_orchestrator.store.redis_client import Client


class Clock(Protocol):
    """A clock that all replicas share."""

    def now(self) -> float:
        """Return the time, in seconds since a moment that all replicas share."""

    async def synchronize(self) -> None:
        """Read the shared time again."""


class StoreClock:
    """Redis' clock, kept as an offset to the local monotonic one.

    So a wrong or jumping wall clock of one replica cannot end anybody's lease.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return time.monotonic() + self._offset

    async def synchronize(self) -> None:
        before = time.monotonic()
        seconds, microseconds = await self._client.time()
        middle = (before + time.monotonic()) / 2
        self._offset = seconds + microseconds / 1e6 - middle
