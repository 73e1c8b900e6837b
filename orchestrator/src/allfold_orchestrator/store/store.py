"""The state store: one Redis, real or in-process, behind one class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError

from allfold_core.survival.term_record import Life
from allfold_orchestrator import background
from allfold_orchestrator.store import keys
from allfold_orchestrator.store.failures import store_errors
from allfold_orchestrator.store.groups import GroupStore
from allfold_orchestrator.store.incidents import IncidentStore
from allfold_orchestrator.store.life import Clock, DecisionTurns, Retention, StoreClock, StoreLives
from allfold_orchestrator.store.limits import LimitStore
from allfold_orchestrator.store.node_store import NodeStore
from allfold_orchestrator.store.notifications import Notifications, relay
from allfold_orchestrator.store.redis_client import Client


class Store:
    """Groups, nodes and the notifications that wake waiters, on one client.

    Attributes:
        times: how long commands take.
        is_embedded: True if it is in this process, and ends with it.
        on_change: called with each group that a replica has changed, or ``None`` after a time in
            which changes may have been missed.
        on_probe: called with each life of a node that a replica wants to be probed.
        on_drain: called with each life of a node that an operator wants to drain.
        on_limits: called when the caps have changed, or may have.
    """

    def __init__(self, client: Client, lease_seconds: float, clock: Clock | None = None) -> None:
        self._client = client
        self._relay: asyncio.Task[None] | None = None
        self.clock = clock or StoreClock(client)
        self.groups = GroupStore(client, self.clock)
        self.nodes = NodeStore(client, self.clock, lease_seconds)
        self.retention = Retention(client)
        self.lives = StoreLives(client)
        self.decisions = DecisionTurns(client)
        self.incidents = IncidentStore(client, self.clock)
        self.limits = LimitStore(client)
        self.times, self.is_embedded = client.times, client.is_embedded
        self.notifications = Notifications()
        self.on_change: list[Callable[[str | None], None]] = []
        self.on_probe: list[Callable[[Life], None]] = []
        self.on_drain: list[Callable[[Life], None]] = []
        self.on_limits: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Begin to listen for the changes that other replicas make."""
        self._relay = asyncio.create_task(
            relay(self._client, self._changed, self._missed_changes), name="change relay"
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

    async def prove_writable(self) -> None:
        """Raise ``ServiceError`` unless the store takes writes."""
        with store_errors():
            await self._client.set(keys.SWEPT, "1")

    def _changed(self, group: str) -> None:
        if group == keys.LIMITS:
            for hear_of in self.on_limits:
                hear_of()
            return
        if keys.is_life(group):
            for ask in self.on_drain if keys.is_drain(group) else self.on_probe:
                ask(keys.parse_life(group))
            return
        self.groups.invalidate(group)
        self.notifications.notify(group)
        for hear in self.on_change:
            hear(group)

    def _missed_changes(self) -> None:
        self.notifications.notify_all()
        for hear_of in self.on_limits:
            hear_of()
        for hear in self.on_change:
            hear(None)
