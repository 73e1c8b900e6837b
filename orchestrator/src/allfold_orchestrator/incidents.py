"""The incidents of the groups and of the store, as this replica knows them."""

from __future__ import annotations

import logging
import uuid
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from time import time
from typing import Any

from allfold_core.errors import ServiceError
from allfold_core.incident import STORE, Cause, Effect, Incident
from allfold_orchestrator.store.incidents import IncidentStore

log = logging.getLogger(__name__)

_REMEMBERED = 4096
_OUTAGES_KEPT = 64


class IncidentLog:
    """The incidents that agents report, and the one that this replica finds: a store that fails.

    Attributes:
        found: how many this replica was told of, or has found, by cause.
    """

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._outage: Incident | None = None
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.found: Counter[str] = Counter()
        # Outages that the store does not know of yet.
        self._over: deque[Incident] = deque(maxlen=_OUTAGES_KEPT)

    async def report(self, incident: dict[str, Any]) -> None:
        """Keep what an agent reports; while the store takes nothing, it is lost."""
        self._count(incident["id"], incident["cause"])
        try:
            await self._store.keep(incident)
        except ServiceError as error:
            log.debug("an incident was not kept: %s", error.message)

    async def reporter_left(self, node: str) -> None:
        """End the incidents that a node has reported, which has signed off."""
        try:
            await self._store.end_all_of(node)
        except ServiceError as error:  # they end by themselves, when nobody repeats them
            log.debug("incidents of node %s were not ended: %s", node, error.message)

    def _count(self, number: str, cause: str) -> None:
        """Count an incident once, however often it is repeated."""
        if (number, cause) not in self._seen:
            self.found[cause] += 1
        self._seen[number, cause] = None
        self._seen.move_to_end((number, cause))
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    async def latest(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest incidents, open ones first; during an outage of the store that one.

        Raises:
            ServiceError: the store does not answer, and the sweeper has not noticed yet.
        """
        outage = self._outage
        own = [] if outage is None else [outage.to_dict()]
        try:
            return (own + await self._store.latest(limit))[:limit]
        except ServiceError:
            if outage is None:
                raise
            return own[:limit]

    def store_failed(self, sentence: str) -> None:
        """Note that the store does not answer, or takes no writes."""
        if self._outage is None:
            now, number = time(), f"store-{uuid.uuid4().hex[:12]}"
            self._outage = Incident(
                number, Cause.STORE_FAILED, Effect.HANG, STORE, sentence, began=now, seen=now
            )
            self._count(number, Cause.STORE_FAILED.value)

    async def store_works(self) -> None:
        """Note that the store works again."""
        if self._outage is not None:
            self._over.append(replace(self._outage, ended=time()))
            self._outage = None
        try:
            while self._over:
                await self._store.keep(self._over[0].to_dict())
                self._over.popleft()
        except ServiceError as error:
            log.debug("an outage is kept for later: %s", error.message)
