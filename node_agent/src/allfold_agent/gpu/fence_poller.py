"""Polling of what sends no notification: words that GPUs write, and points in the work of GPUs.

CUDA can wait for these as well, but without a deadline, and without end where the process that owns
a GPU's work has been killed. So one thread polls them while there are any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from time import monotonic, sleep

from allfold_agent.runtime.locks import make_condition

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
