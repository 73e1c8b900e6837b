"""The thread of the short lane between nodes: it looks again and again for a moment, then blocks.

To be woken costs more than such an op takes. But nobody may keep a processor busy while nothing
happens: after some tens of microseconds without any progress the thread blocks until a rank or
another node has something for it.
"""

from __future__ import annotations

import logging
import os
from threading import Thread, get_ident
from time import monotonic
from typing import Protocol

from allfold_agent.runtime.event_loop import READABLE, WRITABLE, EventLoop
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import ignore_overflows, start_thread

__all__ = ["READABLE", "WRITABLE", "LaneThread", "ServedLane"]

log = logging.getLogger(__name__)

_SPIN_SECONDS = 60e-6
# Whoever has something for the thread wakes it. It looks by itself now and then all the same.
_LONGEST_BLOCK_SECONDS = 5.0


class ServedLane(Protocol):
    """A lane that the thread serves; it alone calls these."""

    def advance(self) -> bool:
        """Do what can be done now, without waiting; return True if there was something."""

    def announce(self, blocks: bool) -> None:
        """Tell the ranks whether the thread has to be woken from now on."""

    def rest(self) -> None:
        """Let go of memory that is not in use, as nothing has happened for some seconds."""


class LaneThread(EventLoop):
    """Serves the lanes of all groups, and the connections that they use, from the first task on."""

    def __init__(self, name: str) -> None:
        super().__init__(name, make_lock("lane"))
        self._lanes: list[ServedLane] = []
        self._thread: Thread | None = None

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, self.name)

    def _join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout=seconds)

    # In the thread

    def add(self, lane: ServedLane) -> None:
        """Serve a lane from now on."""
        if lane not in self._lanes:
            self._lanes.append(lane)

    def remove(self, lane: ServedLane) -> None:
        """Serve a lane no more."""
        if lane in self._lanes:
            self._lanes.remove(lane)

    def _run(self) -> None:
        self._ident = get_ident()
        ignore_overflows()
        spin_until = 0.0
        while not self._closing:
            if self._look(0.0):
                spin_until = monotonic() + _SPIN_SECONDS
            elif monotonic() < spin_until:
                os.sched_yield()
            else:
                self._block()
                spin_until = monotonic() + _SPIN_SECONDS

    def _block(self) -> None:
        """Wait to be woken, unless something has come while the ranks were told."""
        for lane in self._lanes:
            lane.announce(blocks=True)
        if not self._look(0.0) and not self._look(_LONGEST_BLOCK_SECONDS):
            for lane in self._lanes:
                self._guarded(lane.rest)
        for lane in self._lanes:
            lane.announce(blocks=False)

    def _look(self, seconds: float) -> bool:
        """Serve what is there, or comes within so many seconds; return True if there was any."""
        moved = self._serve_ready(seconds)
        for lane in list(self._lanes):
            try:
                moved = lane.advance() or moved
            except Exception:
                log.exception("the short lane could not go on")
        return moved
