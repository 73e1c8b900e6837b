"""What is wrong in the groups, and with the store, as this replica knows it."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from time import time
from typing import Any

from allfold_core.errors import ServiceError
from allfold_core.incident import STORE, Cause, Effect, Incident
from allfold_orchestrator.store.incidents import IncidentStore

log = logging.getLogger(__name__)


class IncidentLog:
    """The incidents that agents report, and the one that this replica finds: a store that fails."""

    def __init__(self, store: IncidentStore) -> None:
        self._store = store
        self._outage: Incident | None = None
        self._over: list[Incident] = []  # outages that the store does not know of yet

    async def note(self, incident: dict[str, Any]) -> None:
        """Keep what an agent reports; while the store takes nothing, it is lost."""
        try:
            await self._store.note(incident)
        except ServiceError as error:
            log.debug("an incident was not kept: %s", error.message)

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

    async def store_works(self) -> None:
        """Note that the store works again."""
        if self._outage is not None:
            self._over.append(replace(self._outage, ended=time()))
            self._outage = None
        while self._over:
            await self.note(self._over.pop().to_dict())
