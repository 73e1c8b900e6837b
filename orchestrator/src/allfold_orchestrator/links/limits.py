"""The caps on what agents send, as one replica knows them."""

from __future__ import annotations

import asyncio

from allfold_core.protocol.traffic import Cap
from allfold_orchestrator.store.store import Store


class KnownLimits:
    """Reads the caps again when they have changed, or may have.

    Args:
        wake: set when they are to be read.

    Attributes:
        caps: ``None`` before they were read for the first time.
        is_due: they are to be read.
    """

    def __init__(self, store: Store, wake: asyncio.Event) -> None:
        self.caps: tuple[Cap, ...] | None = None
        self.is_due = True
        self._store = store
        self._wake = wake
        store.on_limits.append(self._hear)

    def _hear(self) -> None:
        self.is_due = True
        self._wake.set()

    async def refresh(self) -> None:
        """Read them, if that is due."""
        if self.is_due:
            self.is_due = False
            try:
                self.caps = await self._store.limits.all()
            except BaseException:
                self.is_due = True
                raise
