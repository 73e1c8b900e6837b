"""Notifications that wake long polls of a group, on every replica.

A change is announced on a Redis channel; each replica listens and wakes the waiters of that group.
The channel may lose messages (a reconnect, a full buffer), so of those who wait for a group the
first one also looks again every now and then: a lost message costs a second, never a hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from allfold_orchestrator.store import keys
from allfold_orchestrator.store.redis_client import Client

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.5


class Notifications:
    """The waiting long polls of this replica, by group."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        self.stopping = False

    @contextmanager
    def listen(self, group: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the group changes; the waiter clears it."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(group, {})
        waiting[event] = None
        try:
            yield event
        finally:
            was_first = self.is_first(group, event)
            waiting.pop(event, None)
            if not waiting and self._waiting.get(group) is waiting:
                del self._waiting[group]
            elif was_first:
                next(iter(waiting)).set()  # it is the first one now, and must know

    def is_first(self, group: str, event: asyncio.Event) -> bool:
        """Return True for the oldest waiter of the group on this replica."""
        return next(iter(self._waiting[group])) is event

    def notify(self, group: str) -> None:
        """Wake the waiters of this group."""
        for event in self._waiting.get(group, ()):
            event.set()

    def notify_all(self) -> None:
        """Wake all waiters."""
        for group in self._waiting:
            self.notify(group)

    def stop(self) -> None:
        """Wake all waiters for the last time: the process ends."""
        self.stopping = True
        self.notify_all()


async def relay(
    client: Client, on_change: Callable[[str], None], on_gap: Callable[[], None]
) -> None:
    """Call ``on_change`` with each announced group, until cancelled.

    ``on_gap`` is called when announcements may have been missed: at the start, and after a lost
    connection.
    """
    while True:
        try:
            async with client.pubsub() as channel:
                await channel.subscribe(keys.CHANGES)
                on_gap()
                async for message in channel.listen():
                    if message["type"] == "message":
                        on_change(message["data"])
        except (RedisError, OSError) as error:
            log.debug("the change channel broke, listening again: %s", error)
        await asyncio.sleep(RECONNECT_SECONDS)
