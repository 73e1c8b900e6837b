"""The orchestrator's memory: one Redis, real or in-process, behind one class."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.exceptions import RedisError

from allfold_orchestrator import background
from allfold_orchestrator.bells import Bells, relay
from allfold_orchestrator.clock import Clock, StoreClock
from allfold_orchestrator.failures import store_errors
from allfold_orchestrator.groups import GroupStore
from allfold_orchestrator.node_store import NodeStore
from allfold_orchestrator.redis_client import Client


class Store:
    """Groups, nodes and the bells that wake waiters, on one client."""

    def __init__(self, client: Client, lease_seconds: float, clock: Clock | None = None) -> None:
        self._client = client
        self._relay: asyncio.Task[None] | None = None
        self.clock = clock or StoreClock(client)
        self.groups = GroupStore(client)
        self.nodes = NodeStore(client, self.clock, lease_seconds)
        self.bells = Bells()

    async def start(self) -> None:
        """Begin to listen for the changes that other replicas make."""
        self._relay = asyncio.create_task(
            relay(self._client, self._changed, self.bells.ring_all), name="change relay"
        )

    async def close(self) -> None:
        """Stop listening and close the connections."""
        if self._relay is not None:
            await background.end(self._relay)
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def ping(self) -> None:
        """Raise ``ServiceError`` unless the store answers, also to a write-free command."""
        with store_errors():
            await self._client.ping()

    async def synchronize(self) -> None:
        """Take the time from the store, which also shows that it is there."""
        with store_errors():
            await self.clock.synchronize()

    def _changed(self, group: str) -> None:
        self.groups.invalidate(group)
        self.bells.ring(group)
