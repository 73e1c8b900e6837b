"""The lateness of a loop: how long whoever waits for it had to wait of late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

TICK_SECONDS = 0.25
WINDOW_SECONDS = 15.0

Later = Callable[[float, Callable[[], None]], object]


class LagMeter:
    """Has a timer in a loop, and notes how late it is.

    Args:
        later: has the loop do something after some seconds; from any thread.
    """

    def __init__(self, later: Later) -> None:
        self._later = later
        self._lags: deque[float] = deque(maxlen=int(WINDOW_SECONDS / TICK_SECONDS))
        self._due = float("inf")

    def start(self) -> None:
        """Begin to measure, for as long as the loop runs."""
        self._due = monotonic() + TICK_SECONDS
        self._later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._lags.append(max(0.0, monotonic() - self._due))
        self.start()

    def longest(self) -> float:
        """Return the longest lateness within the window, in seconds. From any thread."""
        return max(0.0, monotonic() - self._due, *list(self._lags))
