"""The number of connections that wait for something to come, by address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

MOST_IDLE = 512


class IdleConnections:
    """The connections of a server on which no request is being answered, with their addresses.

    Where there are too many, the oldest one of the address that has most is aborted: whoever opens
    thousands pushes out nobody else.
    """

    def __init__(self, most: int = MOST_IDLE) -> None:
        self._most = most
        self._connections: dict[Hashable, tuple[str, Callable[[], object]]] = {}

    def add(self, connection: Hashable, address: str, abort: Callable[[], object]) -> None:
        """Take in a connection, and what ends it."""
        self._connections[connection] = address, abort
        if len(self._connections) > self._most:
            addresses = Counter(address for address, _ in self._connections.values())
            ((greedy, _),) = addresses.most_common(1)
            victim, end = next(
                (each, end) for each, (its, end) in self._connections.items() if its == greedy
            )
            self.remove(victim)
            end()

    def remove(self, connection: Hashable) -> None:
        """Forget a connection, which need not be here."""
        self._connections.pop(connection, None)
