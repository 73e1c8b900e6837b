"""The incidents that agents have reported, the latest ones, for people to see."""

from __future__ import annotations

import json
from typing import Any

from allfold_core.incident import LOST_SECONDS
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.life import Clock
from allfold_orchestrator.store.redis_client import Client


class IncidentStore:
    """Keeps the latest incidents by the time at which they were found."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    async def keep(self, incident: dict[str, Any]) -> None:
        """Keep an incident, in place of what was said of it before."""
        entry = json.dumps({"incident": incident, "heard": self._clock.now()})
        number = incident["id"]
        with store_errors():
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(keys.INCIDENTS, number, entry)
                pipe.zadd(keys.INCIDENT_TIMES, {number: incident["seen"]})
                await pipe.execute()

    async def end_all_of(self, reporter: str) -> None:
        """End what a node has reported and was still going on, as it reports nothing any more."""
        now = self._clock.now()
        with store_errors():
            entries = await self._client.hgetall(keys.INCIDENTS)
        for entry in entries.values():
            incident = _read(entry, now)
            if incident["ended"] is None and incident["reporter"] == reporter:
                await self.keep({**incident, "ended": incident["seen"]})

    async def latest(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest incidents, open ones first, each group the newest first.

        One that its reporter has not repeated for long ends with the last time that it did.
        """
        with store_errors():
            numbers = await self._client.zrange(keys.INCIDENT_TIMES, 0, -1)
            if not numbers:
                return []
            entries = await self._client.hmget(keys.INCIDENTS, numbers[::-1])
        now = self._clock.now()
        found = [_read(entry, now) for entry in entries if entry is not None]
        return sorted(found, key=lambda each: each["ended"] is not None)[:limit]


def _read(entry: str, now: float) -> dict[str, Any]:
    kept = json.loads(entry)
    incident: dict[str, Any] = kept["incident"]
    if incident["ended"] is None and now - kept["heard"] > LOST_SECONDS:
        incident["ended"] = max(incident["seen"], kept["heard"])
    return incident
