"""Ending the leases of nodes that fell silent, without taking our own silence for theirs."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from allfold_core.errors import ServiceError
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store import Store

log = logging.getLogger(__name__)

_NOT_YET = "no sweep yet"


@dataclass(slots=True)
class Grace:
    """When an expired lease may be taken seriously.

    While the store or this process was away, no heartbeat could be noted, and every lease looks
    expired although the agents are fine. So whoever just started, or comes back after more than
    half a lease, gives everybody a full lease to be heard first.
    """

    lease_seconds: float
    last_sweep: float | None = None
    until: float = float("-inf")

    def allows_eviction(self, now: float) -> bool:
        """Note a sweep at ``now``; whether it may evict."""
        if self.last_sweep is None or abs(now - self.last_sweep) > self.lease_seconds / 2:
            self.until = now + self.lease_seconds
        self.last_sweep = now
        return now >= self.until


class Sweeper:
    """The task of every replica that looks for expired leases."""

    def __init__(self, store: Store, orchestrator: Orchestrator) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._grace = Grace(store.nodes.lease_seconds)
        self._pause = min(1.0, store.nodes.lease_seconds / 5)
        self.problem: str | None = _NOT_YET

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            try:
                await self.sweep()
                self._report(None)
            except ServiceError as error:
                self._report(error.message)
            except Exception as error:
                log.exception("the sweeper failed")
                self._report(f"the sweeper failed: {error!r}")
            await asyncio.sleep(self._pause)

    async def sweep(self) -> list[str]:
        """Evict the nodes whose lease is over; their names."""
        await self._store.synchronize()
        await self._store.groups.prune_some()
        for node, incarnation in await self._store.nodes.evictions():
            await self._orchestrator.clear_up(node, incarnation)
        now = self._store.clock.now()
        if not self._grace.allows_eviction(now):
            return []
        expired = await self._store.nodes.expired(now)
        return [node for node, life in expired if await self._evict(node, life, now)]

    async def _evict(self, node: str, incarnation: str, now: float) -> bool:
        first = await self._store.nodes.evict(node, incarnation, expired_at=now)
        if first:  # of all replicas
            log.warning("node lost: its lease ended", extra={"node": node})
            await self._orchestrator.clear_up(node, incarnation)
        return first

    def _report(self, problem: str | None) -> None:
        """Log when the store goes and when it comes back, not every second in between."""
        if problem and self.problem in (None, _NOT_YET):
            log.error("leases cannot be watched: %s", problem)
        elif self.problem and not problem:
            log.info("leases are watched")
        self.problem = problem
