"""Callbacks for the end of a GPU's work, which finishes in the order in which it was queued."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, Protocol

from allfold_agent.gpu.fence_poller import FencePoller
from allfold_agent.runtime.locks import make_lock

log = logging.getLogger(__name__)

_QUIET_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 3600.0

Then = Callable[[Exception | None], None]


class Reachable(Protocol):
    """A point in the work of one GPU."""

    def is_reached(self) -> bool:
        """Return true if all work before it is done; raise the error of a GPU that failed."""


class _Expected(NamedTuple):
    point: Reachable
    then: Then
    deadline: float


class Completions:
    """The awaited points of one GPU's work, in order: only the first one is polled.

    Args:
        poller: who looks.
    """

    def __init__(self, poller: FencePoller) -> None:
        self._poller = poller
        self._lock = make_lock("gpu completions")
        self._expected: deque[_Expected] = deque()
        self._stuck: list[_Expected] = []
        self._quiet_since = 0.0

    @property
    def count(self) -> int:
        """The number of points that are waited for."""
        return len(self._expected)

    @property
    def is_stuck(self) -> bool:
        """True if the GPU may still run abandoned work, or did so until just now.

        Ranks that were told of a failure use their memory again, and late work of the GPU would
        overwrite it. They may have started to do so just before that work was done.
        """
        return bool(self._stuck) or monotonic() < self._quiet_since + _QUIET_SECONDS

    def add(self, point: Reachable, then: Then, seconds: float) -> None:
        """Call ``then(None)`` when the point is reached, from the poller's thread.

        Or with what went wrong: after ``seconds``, a ``TimeoutError``.
        """
        with self._lock:
            self._expected.append(_Expected(point, then, monotonic() + seconds))
            first = len(self._expected) == 1
        if first:
            self._await_first()

    def _await_first(self) -> None:
        first = self._expected[0].point
        self._poller.when(
            lambda: first.is_reached() or self._is_any_late(), self._advance, _LONGEST_LOOK_SECONDS
        )

    def _is_any_late(self) -> bool:
        now = monotonic()
        with self._lock:
            late = [each for each in self._expected if now >= each.deadline]
        return any(not _is_over(each.point) for each in late)

    def _advance(self, error: Exception | None) -> None:
        """Report the points that are reached, in their order, and give up those that are late."""
        more = True
        over = error is not None and not isinstance(error, TimeoutError)
        while more:
            first = self._expected[0]
            try:
                over = over or first.point.is_reached()
            except Exception as problem:  # noqa: BLE001 - it is handed on
                error, over = problem, True
            if not over:
                more = self._give_up_late()
                break
            more = self._finish(first, error)
            error, over = None, False
        if more:
            self._await_first()

    def _give_up_late(self) -> bool:
        """Tell those whose time is over; whether there are others."""
        now, more = monotonic(), True
        late = [each for each in list(self._expected) if now >= each.deadline]
        for each in [each for each in late if not _is_over(each.point)]:
            self._await_stuck(each)
            more = self._finish(each, TimeoutError())
        return more

    def _await_stuck(self, stuck: _Expected) -> None:
        """Keep it, with all that it uses, until the GPU is done with it."""
        self._stuck.append(stuck)

        def then(error: Exception | None) -> None:
            self._quiet_since = monotonic()
            self._stuck.remove(stuck)
            if error is not None:  # the time is over, and it is not
                self._await_stuck(stuck)

        self._poller.when(lambda: _is_over(stuck.point), then, _LONGEST_LOOK_SECONDS)

    def _finish(self, expected: _Expected, error: Exception | None) -> bool:
        """Call back for one; return True if there are more, which the caller has to see to."""
        try:
            expected.then(error)
        except Exception:
            log.exception("what waited for a GPU failed")
        with self._lock:
            self._expected.remove(expected)
            return bool(self._expected)


def _is_over(point: Reachable) -> bool:
    """Return true if the GPU does nothing more for it: it is done, or the GPU has failed."""
    try:
        return point.is_reached()
    except Exception:  # noqa: BLE001 - whoever used it has been told of an error already
        return True
