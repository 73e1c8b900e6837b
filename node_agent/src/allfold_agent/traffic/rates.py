"""Rates: a token bucket, which keeps to one, and a meter, which finds out that of a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

CHUNK_SECONDS = 0.02
"""What goes at once, at most: as much as a line or a cap carries in this time."""


class Bucket:
    """The bytes that may go at a rate. In any interval: ``rate * seconds + burst`` at most.

    It begins empty, so that this holds from its beginning on.

    Args:
        rate: bytes per second.
        now: on the clock of all further calls.
        burst: the most bytes that it holds; by default those of :data:`CHUNK_SECONDS`.
    """

    __slots__ = ("_at", "_fixed_burst", "burst", "level", "rate")

    def __init__(self, rate: float, now: float, burst: float = 0.0) -> None:
        self.rate = rate
        self.level = 0.0
        self._at = now
        self._fixed_burst = burst
        self.burst = burst or rate * CHUNK_SECONDS

    def fill(self, now: float) -> float:
        """Add what has come since the last call; return the bytes that there are."""
        self.level = min(self.burst, self.level + max(0.0, now - self._at) * self.rate)
        self._at = max(self._at, now)
        return self.level

    def change(self, rate: float, now: float) -> None:
        """Go on with another rate."""
        self.fill(now)
        self.rate = rate
        self.burst = self._fixed_burst or rate * CHUNK_SECONDS
        self.level = min(self.level, self.burst)

    def seconds_to(self, nbytes: float) -> float:
        """Return how long it takes until there are so many, also if it never holds them at once."""
        return max(0.0, (nbytes - self.level) / self.rate)


class ZoneBytes:
    """Adds up, by zone, what counters have counted that begin anew or go when their edge does."""

    def __init__(self) -> None:
        self._total: Counter[str] = Counter()
        self._before: Mapping[tuple[Any, ...], int] = {}

    def add(self, counted: Mapping[tuple[Any, ...], int]) -> Counter[str]:
        """Return the totals; one caller at a time.

        Args:
            counted: the counters that there are, by a key that ends in the zone.
        """
        before, self._before = self._before, counted
        for key, count in counted.items():
            last = before.get(key, 0)
            self._total[key[-1]] += count - last if count >= last else count
        return self._total


_WINDOW_SECONDS = 0.05
_GROWTH = 1.25
UNKNOWN_RATE = 1.25e6
"""Bytes per second that are taken for the rate of a line of which nothing is known."""


class RateMeter:
    """The rate of a line, from what is acknowledged while there is more to be sent.

    Not the kernel's delivery rate: that of a short burst may be many times what a line carries that
    is limited by a token bucket, as most virtual ones are. Where the sender was found idle, the
    line may carry more than it was given, so the rate grows with each window.

    Attributes:
        rate: bytes per second.
    """

    __slots__ = ("_acked", "_began", "_was_idle", "rate")

    def __init__(self) -> None:
        self.rate = UNKNOWN_RATE
        self._began, self._acked, self._was_idle = float("-inf"), 0, False

    def restart(self) -> None:
        """Forget what has been seen since the last window: others were on the line."""
        self._began = float("-inf")

    def note(self, now: float, acked: int, queued: int) -> None:
        """Take in how many bytes are acknowledged so far, and how many are not sent or not yet."""
        seconds = now - self._began
        if seconds > 10 * _WINDOW_SECONDS:  # the first look, or nothing was to be sent
            self._began, self._acked, self._was_idle = now, acked, False
            return
        self._was_idle = self._was_idle or not queued
        if seconds < _WINDOW_SECONDS:
            return
        measured = (acked - self._acked) / seconds
        if not self._was_idle:
            self.rate = max(measured, 1.0)
        elif _GROWTH * measured > self.rate:
            self.rate = _GROWTH * measured
        self._began, self._acked, self._was_idle = now, acked, False
