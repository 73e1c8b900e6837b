"""Polling of what GPUs do, which send no notification, and callbacks for the end of their work."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from allfold_agent.runtime.locks import make_condition, make_lock

log = logging.getLogger(__name__)

# For so long after something new it looks without a pause; then at intervals that grow with the
# time that it has waited already, so that waiting for long costs little and adds little.
_EAGER_SECONDS = 0.0002
_SHORTEST_PAUSE = 0.00005
_LONGEST_PAUSE = 0.001
_SHARE = 0.05

Then = Callable[[Exception | None], None]


@dataclass(eq=False, slots=True)
class _Watched:
    condition: Callable[[], bool]
    then: Then
    since: float
    deadline: float


class FencePoller:
    """One thread that looks at conditions.

    Args:
        name: of the thread, which starts when it is first needed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = make_condition("gpu fences")
        self._watched: list[_Watched] = []
        self._thread: Thread | None = None
        self._closed = False

    def when(self, condition: Callable[[], bool], then: Then, seconds: float) -> None:
        """Call ``then(None)`` when a condition holds, in the thread that looks.

        Args:
            condition: must be quick. What it raises is what ``then`` is called with.
            then: must not wait.
            seconds: after this time ``then`` is called with a ``TimeoutError``.
        """
        now = monotonic()
        with self._changed:
            if self._closed:
                raise RuntimeError("nobody looks any more")
            self._watched.append(_Watched(condition, then, now, now + seconds))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread; what has not happened by then is forgotten."""
        with self._changed:
            self._closed = True
            self._watched.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5.0)

    def _run(self) -> None:
        running = True
        while running:
            # A call of its own, so that no variable here keeps what is over.
            running = self._look_at_all()

    def _look_at_all(self) -> bool:
        """Poll all fences once; return False if the thread has to end."""
        if not (watched := self._next()):
            return False
        now = monotonic()
        over = [each for each in watched if self._look(each, now)]
        if over:
            with self._changed:
                self._watched = [each for each in self._watched if each not in over]
        else:
            sleep(_pause(now - max(each.since for each in watched)))
        return True

    def _next(self) -> list[_Watched]:
        """Return the fences to look at; an empty list where the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched or self._closed)
            return list(self._watched)

    @staticmethod
    def _look(watched: _Watched, now: float) -> bool:
        """Return true if a wait is over and its callback was called."""
        error: Exception | None = None
        try:
            if not watched.condition():
                if now < watched.deadline:
                    return False
                error = TimeoutError()
        except Exception as problem:  # noqa: BLE001 - it is handed on
            error = problem
        try:
            watched.then(error)
        except Exception:
            log.exception("what waited for a GPU failed")
        return True


def _pause(waited: float) -> float:
    """Seconds until the next look; 0 lets other threads go first."""
    if waited < _EAGER_SECONDS:
        return 0.0
    return min(max(waited * _SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE)


_QUIET_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 3600.0


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
