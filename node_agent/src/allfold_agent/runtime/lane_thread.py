"""The thread of the short lane between nodes: it looks again and again for a moment, then blocks.

To be woken costs more than such an op takes. But nobody may keep a processor busy while nothing
happens: after some tens of microseconds without any progress the thread blocks until a rank or
another node has something for it.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Thread
from time import monotonic
from typing import Protocol

import numpy as np

from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import start_thread

log = logging.getLogger(__name__)

READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
_SPIN_SECONDS = 60e-6
# Whoever has something for the thread wakes it. It looks by itself now and then all the same.
_LONGEST_BLOCK_SECONDS = 5.0

Serve = Callable[[int], None]


class ServedLane(Protocol):
    """A lane that the thread serves; it alone calls these."""

    def advance(self) -> bool:
        """Do what can be done now, without waiting; return True if there was something."""

    def announce(self, blocks: bool) -> None:
        """Tell the ranks whether the thread has to be woken from now on."""

    def rest(self) -> None:
        """Let go of memory that is not in use, as nothing has happened for some seconds."""


class LaneThread:
    """Serves the lanes of all groups, and the connections that they use.

    Attributes:
        wake_descriptor: an eventfd: who writes to it wakes the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self.wake_descriptor, READABLE)
        self._served: dict[int, Serve] = {self.wake_descriptor: self._drain}
        self._lanes: list[ServedLane] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._starting = make_lock("lane")
        self._thread: Thread | None = None
        self._closing = False

    # From any thread

    def call(self, task: Callable[[], None]) -> None:
        """Do something soon, in the lane's thread; the thread begins with the first task."""
        self._tasks.append(task)
        with self._starting:
            if self._closing:
                return
            if self._thread is None:
                self._thread = start_thread(self._run, self._name)
            os.eventfd_write(self.wake_descriptor, 1)

    def close(self) -> None:
        """End the thread."""
        with self._starting:
            self._closing = True
            os.eventfd_write(self.wake_descriptor, 1)
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._epoll.close()
        os.close(self.wake_descriptor)

    # In the thread

    def add(self, lane: ServedLane) -> None:
        """Serve a lane from now on."""
        if lane not in self._lanes:
            self._lanes.append(lane)

    def remove(self, lane: ServedLane) -> None:
        """Serve a lane no more."""
        if lane in self._lanes:
            self._lanes.remove(lane)

    def register(self, descriptor: int, serve: Serve) -> None:
        """Call ``serve(events)`` whenever something can be read from a connection."""
        self._epoll.register(descriptor, READABLE)
        self._served[descriptor] = serve

    def modify(self, descriptor: int, events: int) -> None:
        """Wait for other events of a connection."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: int) -> None:
        """Forget a connection, before it is closed."""
        self._epoll.unregister(descriptor)
        del self._served[descriptor]

    def _drain(self, _events: int) -> None:
        os.eventfd_read(self.wake_descriptor)

    def _run(self) -> None:
        np.seterr(all="ignore")  # of this thread: its ops fold with NumPy
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
                _guarded(lane.rest)
        for lane in self._lanes:
            lane.announce(blocks=False)

    def _look(self, seconds: float) -> bool:
        """Serve what is there, or comes within so many seconds; return True if there was any."""
        moved = False
        for descriptor, events in self._epoll.poll(seconds):
            serve = self._served.get(descriptor)
            if serve is not None:
                moved = True
                _guarded(partial(serve, events))
        while self._tasks:
            moved = True
            _guarded(self._tasks.popleft())
        for lane in list(self._lanes):
            try:
                moved = lane.advance() or moved
            except Exception:
                log.exception("the short lane could not go on")
        return moved


def _guarded(work: Callable[[], None]) -> None:
    """Do something; its failure must not end the thread that serves all."""
    try:
        work()
    except Exception:
        log.exception("the thread of the short lane could not finish what it was doing")
