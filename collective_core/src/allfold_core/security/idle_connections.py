"""The number of connections that wait for something to come, by address."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic

# Beyond so many those are ended that have been idle for a while. Thousands of agents that come back
# at once, as their orchestrator has been replaced, are more, and idle for a moment each.
MOST_IDLE = 512
PATIENCE_SECONDS = 5.0
# Never more, nor a quarter of the descriptors that this process may have.
MOST_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Idle:
    address: str
    since: float
    abort: Callable[[], object]


class IdleConnections:
    """The connections of a server on which no request is being answered, with their addresses.

    Where there are too many, the oldest one of the address that has most is aborted: whoever opens
    thousands pushes out nobody else.

    Args:
        most: beyond so many, those are aborted that are idle for :data:`PATIENCE_SECONDS`.
        most_at_once: beyond so many, others too; at least ``most``.
    """

    def __init__(self, most: int = MOST_IDLE, most_at_once: int | None = None) -> None:
        self._most = most
        self._most_at_once = max(most, _at_once() if most_at_once is None else most_at_once)
        self._connections: dict[Hashable, _Idle] = {}  # the oldest first
        self._counts: Counter[str] = Counter()

    def add(self, connection: Hashable, address: str, abort: Callable[[], object]) -> None:
        """Take in a connection, and what ends it."""
        self.remove(connection)
        self._connections[connection] = _Idle(address, monotonic(), abort)
        self._counts[address] += 1
        while (victim := self._victim()) is not None:
            idle = self._connections[victim]
            self.remove(victim)
            idle.abort()

    def remove(self, connection: Hashable) -> None:
        """Forget a connection, which need not be here."""
        idle = self._connections.pop(connection, None)
        if idle is not None:
            self._counts[idle.address] -= 1
            if not self._counts[idle.address]:
                del self._counts[idle.address]

    def _victim(self) -> Hashable | None:
        if len(self._connections) <= self._most:
            return None
        impatient = monotonic() - PATIENCE_SECONDS
        has_room = len(self._connections) <= self._most_at_once
        if has_room and next(iter(self._connections.values())).since > impatient:
            return None  # even the oldest has come just now
        greediest = max(self._counts, key=self._counts.__getitem__)
        victim, idle = next(
            each for each in self._connections.items() if each[1].address == greediest
        )
        return None if has_room and idle.since > impatient else victim


def _at_once() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_AT_ONCE, descriptors // 4)
