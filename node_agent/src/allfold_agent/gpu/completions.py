"""Who is told when a GPU has done its work, which it does in the order in which it was given."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import NamedTuple, Protocol

from allfold_agent.watch import Watch

log = logging.getLogger(__name__)

Then = Callable[[Exception | None], None]


class Reachable(Protocol):
    """A point in the work of one GPU."""

    def is_reached(self) -> bool:
        """Whether all before it is done; raises what the GPU has come to."""


class _Expected(NamedTuple):
    point: Reachable
    then: Then
    deadline: float


class Completions:
    """The points of one GPU's work that somebody waits for, in order: only the first is looked at.

    Args:
        watch: who looks.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = Lock()
        self._expected: deque[_Expected] = deque()
        # What a stuck GPU may still use must live as long as it does.
        self._stuck: list[_Expected] = []

    @property
    def count(self) -> int:
        """How many points are waited for."""
        return len(self._expected)

    def add(self, point: Reachable, then: Then, seconds: float) -> None:
        """Call ``then(None)`` when the point is reached, from the watch's thread.

        Or with what went wrong: after ``seconds``, a ``TimeoutError``.
        """
        with self._lock:
            self._expected.append(_Expected(point, then, monotonic() + seconds))
            first = len(self._expected) == 1
        if first:
            self._await_first()

    def _await_first(self) -> None:
        point, _, deadline = self._expected[0]
        self._watch.when(point.is_reached, self._advance, max(0.0, deadline - monotonic()))

    def _advance(self, error: Exception | None) -> None:
        """The first one is over; so may be some behind it."""
        more = self._finish_first(error)
        while more:
            try:
                if not self._expected[0].point.is_reached():
                    self._await_first()
                    return
            except Exception as problem:  # noqa: BLE001 - it is handed on
                more = self._finish_first(problem)
            else:
                more = self._finish_first(None)

    def _finish_first(self, error: Exception | None) -> bool:
        """Tell of the first one; whether there are more, which whoever asks has to see to."""
        try:
            self._expected[0].then(error)
        except Exception:
            log.exception("what waited for a GPU failed")
        with self._lock:
            first = self._expected.popleft()
            if isinstance(error, TimeoutError):
                self._stuck.append(first)
            return bool(self._expected)
