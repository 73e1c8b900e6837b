"""One thread that serves many descriptors, each as soon as it is ready.

An agent has one for the messages of ranks and what nodes agree upon, which must wait for nothing
that takes time, and one for the frames of other nodes, which folds what they bring: a hand-over to
a third thread takes longer than most folds.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from threading import Thread
from time import monotonic

from allfold_agent.runtime.event_loop import HUNG_UP, READABLE, WRITABLE, Action, EventLoop, Serve
from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.threads import ignore_overflows

__all__ = ["HUNG_UP", "READABLE", "WRITABLE", "Acceptor", "Action", "LagMeter", "Reactor", "Serve"]

log = logging.getLogger(__name__)

_LONGEST_POLL = 5.0


class Reactor(EventLoop):
    """An event loop with timers, whose thread begins with :meth:`start`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, make_lock("reactor"))
        self._timers: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()
        self._ident = self._thread.ident or 0

    def _join(self, seconds: float) -> None:
        if self._ident:
            self._thread.join(timeout=seconds)

    def later(self, seconds: float, task: Action) -> None:
        """Do something after a while, in the reactor's thread; from any thread."""
        timer = (monotonic() + seconds, next(self._numbers), task)
        if self.is_current():
            heappush(self._timers, timer)
        else:
            self.call(lambda: heappush(self._timers, timer))

    def _run(self) -> None:
        ignore_overflows()
        while not self._closing:
            self._serve_ready(self._patience())
            while self._timers and self._timers[0][0] <= monotonic():
                self._guarded(heappop(self._timers)[2])

    def _patience(self) -> float:
        if not self._timers:
            return _LONGEST_POLL
        return min(_LONGEST_POLL, max(0.0, self._timers[0][0] - monotonic()))


_PAUSE_SECONDS = 0.1


class Acceptor:
    """Accepts the connections of a listener as long as the process has descriptors for them.

    Without any it pauses: the listener stays readable, and the reactor would do nothing else.

    Args:
        accepted: called with each new connection, in the reactor's thread.
        name: what is listened for, for the log.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket,
        accepted: Callable[[socket.socket], None],
        name: str,
    ) -> None:
        self._reactor = reactor
        self._listener = listener
        self._accepted = accepted
        self._name = name
        self._failed_at: float | None = None
        listener.setblocking(False)
        reactor.register(listener, self._accept)

    def _accept(self, _events: int) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError as error:
            self._pause(error)
            return
        if self._failed_at is not None:
            seconds, self._failed_at = monotonic() - self._failed_at, None
            log.info("%s are accepted again, after %.1f s", self._name, seconds)
        self._accepted(connected)

    def _pause(self, error: OSError) -> None:
        if self._failed_at is None:
            self._failed_at = monotonic()
            log.warning("%s cannot be accepted until others end: %s", self._name, error)
        self._reactor.unregister(self._listener)
        self._reactor.later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._reactor.register(self._listener, self._accept)


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
