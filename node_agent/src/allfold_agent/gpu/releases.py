"""Release of memory that a GPU may use: CUDA waits for the GPU then, without end if it is stuck."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

log = logging.getLogger(__name__)

Release = Callable[[], None]


class Releases:
    """A thread that does so, one after the other: nobody else waits for it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._due: SimpleQueue[Release] = SimpleQueue()  # finalizers may put something in
        Thread(target=self._run, name=name, daemon=True).start()

    def later(self, release: Release) -> None:
        """Have something let go of, after all that was asked for before it."""
        self._due.put(release)

    def _run(self) -> None:
        while True:
            release = self._due.get()
            try:
                release()
            except Exception:
                log.exception("memory that GPUs used is not given back")
            del release  # it must not keep anything while nothing is due
