"""The bound on the memory of results that are kept for other nodes."""

from __future__ import annotations

from allfold_agent.runtime.locks import make_lock

LEAST_BYTES = 256 << 20


class Retention:
    """The bound on what the groups of this node keep, in equal shares.

    No group waits for the memory of another one: two groups whose ops are called in different
    orders on two nodes would wait for each other.

    Args:
        limit: in bytes; by default at least 256 MiB, and twice the largest result.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._given = limit
        self._limit = LEAST_BYTES if limit is None else limit
        self._groups = 0
        self._share = self._limit
        self._lock = make_lock("retention")

    @property
    def limit(self) -> int:
        """The bound for all groups together, in bytes."""
        return self._limit

    @property
    def share(self) -> int:
        """The bound for each group, in bytes."""
        return self._share

    def enter(self) -> None:
        """One more group keeps results."""
        with self._lock:
            self._groups += 1
            self._divide()

    def leave(self) -> None:
        """One of the groups is over."""
        with self._lock:
            self._groups -= 1
            self._divide()

    def note(self, nbytes: int) -> None:
        """There is a result of so many bytes."""
        if self._given is None and 2 * nbytes > self._limit:
            with self._lock:
                self._limit = max(self._limit, 2 * nbytes)
                self._divide()

    def _divide(self) -> None:
        self._share = self._limit // max(1, self._groups)
