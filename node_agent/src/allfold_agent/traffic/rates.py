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
# A line that has this much of a chunk waiting, beside what is under way, is busy.
_BUSY = 0.25
UNKNOWN_RATE = 1.25e6
"""Bytes per second that are taken for the rate of a line of which nothing is known."""


class RateMeter:
    """The rate of a line, from what is acknowledged while there is more to be sent.

    Not the kernel's delivery rate: that of a short burst may be many times what a line carries that
    is limited by a token bucket, as most virtual ones are. A window lasts until all is acknowledged
    that was under way when it began, so it is never shorter than a round trip.

    Attributes:
        rate: bytes per second.
    """

    __slots__ = ("_acked", "_before", "_began", "_first", "_least", "rate")

    def __init__(self) -> None:
        self.rate = UNKNOWN_RATE
        self._before = float("inf")  # what the last busy window has measured
        self._began: float | None = None
        self._acked = self._first = self._least = 0

    def restart(self) -> None:
        """Forget what has been seen since the last window: others were on the line."""
        self._began = None

    def note(self, now: float, acked: int, queued: int, round_trip: float) -> None:
        """Take in the state of a connection.

        Args:
            acked: bytes that are acknowledged so far.
            queued: bytes that are not sent, or not acknowledged.
            round_trip: the shortest that there was, in seconds.
        """
        if self._began is not None:
            seconds = now - self._began
            self._least = min(self._least, queued)
            if seconds < _WINDOW_SECONDS or acked - self._acked < self._first:
                return
            self._take((acked - self._acked) / seconds, round_trip)
        self._began, self._acked, self._first, self._least = now, acked, queued, queued

    def _take(self, measured: float, round_trip: float) -> None:
        """Take in what a window has measured.

        A line that is not busy has no more outstanding than it carries in a round trip (Little's
        law). It may carry more than it was given, so such a window only lets the rate grow: fast up
        to what the line was found to carry, as in TCP's slow start, and beyond that by so much that
        a quarter of a chunk more is outstanding. The rate sinks with the second busy window that
        has measured less: a stall falls into one only, and says nothing about the line.
        """
        if self._least > measured * (round_trip + _BUSY * CHUNK_SECONDS):
            self.rate, self._before = max(measured, min(self._before, self.rate)), measured
            return
        if measured > _GROWTH * self._before:  # not the limit of the line: TCP began slowly
            self._before = float("inf")
        careful = 1 + (_GROWTH - 1) * CHUNK_SECONDS / (round_trip + CHUNK_SECONDS)
        self.rate = max(self.rate, min(_GROWTH * measured, max(self._before, careful * measured)))
