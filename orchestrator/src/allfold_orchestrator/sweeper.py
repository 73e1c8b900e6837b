"""The sweeper: ends the leases of silent nodes, but not for an outage of the orchestrator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from allfold_core.errors import ServiceError
from allfold_orchestrator.membership.nodes import LEASE_ENDED
from allfold_orchestrator.service import Orchestrator
from allfold_orchestrator.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_YET = "no sweep yet"


@dataclass(slots=True)
class Grace:
    """The time after a start or an outage in which no lease is ended.

    While the store or this process was away, no heartbeat could be noted, and every lease looks
    expired although the agents are fine. So a sweeper that has just started, or could not sweep for
    more than half a lease, gives all nodes a full lease to send a heartbeat first.
    """

    lease_seconds: float
    last_sweep: float | None = None
    until: float = float("-inf")

    def allows_eviction(self, now: float) -> bool:
        """Note a sweep at ``now``; return True if it may evict."""
        if self.last_sweep is None or abs(now - self.last_sweep) > self.lease_seconds / 2:
            self.until = now + self.lease_seconds
        self.last_sweep = now
        return now >= self.until


class Sweeper:
    """The background task of every replica that ends expired leases."""

    def __init__(self, store: Store, orchestrator: Orchestrator) -> None:
        self._store = store
        self._orchestrator = orchestrator
        self._grace = Grace(store.nodes.lease_seconds)
        self._pause = min(1.0, store.nodes.lease_seconds / 5)
        self._unreadable: set[str] = set()  # nodes of which it has been logged
        self.problem: str | None = _NOT_YET

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await self.sweep()
                self._report(None)
            except ServiceError as error:
                self._report("the state store does not answer", error.message)
            except Exception as error:
                log.exception("the sweeper failed")
                self._report("the sweeper failed; the log says why", repr(error))
            await asyncio.sleep(self._pause)

    async def sweep(self) -> list[str]:
        """Evict the nodes whose lease is over; return their names."""
        await self._store.synchronize()
        now = self._store.clock.now()
        await self._store.groups.prune_some()
        await self._store.retention.apply(now)
        for life in await self._store.nodes.evictions():
            await self._spare_others(life[0], self._orchestrator.clear_up([life]))
        if not self._grace.allows_eviction(now):
            return []
        expired = await self._store.nodes.expired(now)
        return [
            node
            for node, incarnation in expired
            if await self._spare_others(node, self._evict(node, incarnation, now))
        ]

    async def _spare_others(self, node: str, work: Awaitable[T]) -> T | None:
        """Await work on one node; a record that cannot be read must not stop the others'."""
        try:
            return await work
        except ServiceError as error:
            if not error.details.get("unreadable"):
                raise
            if node not in self._unreadable:
                log.error("%s", error.message, extra={"node": node})
                self._unreadable.add(node)
            return None

    async def _evict(self, node: str, incarnation: str, now: float) -> bool:
        first = await self._store.nodes.evict(node, incarnation, LEASE_ENDED, expired_at=now)
        if first:  # of all replicas
            log.warning("node lost: %s", LEASE_ENDED, extra={"node": node})
            await self._orchestrator.clear_up([(node, incarnation)])
        return first

    def _report(self, problem: str | None, cause: str = "") -> None:
        """Log when the store goes and when it comes back, not every second in between.

        ``problem`` is shown to everybody who asks for readiness; ``cause`` is for the log.
        """
        if problem and self.problem in (None, _NOT_YET):
            log.error("leases cannot be watched: %s (%s)", problem, cause)
        elif self.problem and not problem:
            log.info("leases are watched")
        self.problem = problem
