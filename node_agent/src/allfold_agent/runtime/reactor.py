"""One thread that serves many descriptors, each as soon as it is ready.

An agent has one for the messages of ranks and what nodes agree upon, which must wait for nothing
that takes time, and one for the frames of other nodes, which folds what they bring: a hand-over to
a third thread takes longer than most folds.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from threading import Thread, get_ident
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.runtime.locks import make_lock

if TYPE_CHECKING:
    from _typeshed import HasFileno

log = logging.getLogger(__name__)

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
HUNG_UP = select.EPOLLRDHUP

_LONGEST_POLL = 5.0

Serve = Callable[[int], None]
Action = Callable[[], None]


class Reactor:
    """Descriptors, tasks and timers of one thread. What it calls must not wait.

    All but :meth:`call` and :meth:`close` is for the reactor's own thread, or for before it starts.
    """

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._served: dict[int, Serve] = {}
        self._tasks: deque[Action] = deque()
        self._timers: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READABLE)
        self._served[self._wake] = lambda _: self._drain()
        self._closing = False
        self._waking = make_lock("reactor")
        self._ident = 0
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()
        self._ident = self._thread.ident or 0

    @property
    def running(self) -> bool:
        """True until :meth:`close`; after that, tasks are not run."""
        return not self._closing

    def is_current(self) -> bool:
        """Return True in the reactor's own thread."""
        return get_ident() == self._ident

    def close(self) -> None:
        """End the thread; what is not done by then is not done any more."""
        with self._waking:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        if self._ident:
            self._thread.join(timeout=5.0)
        self._epoll.close()
        os.close(self._wake)

    def call(self, task: Action) -> None:
        """Do something soon, in the reactor's thread; from any thread, and without waiting."""
        self._tasks.append(task)
        if not self.is_current():
            with self._waking:
                if not self._closing:
                    os.eventfd_write(self._wake, 1)

    def later(self, seconds: float, task: Action) -> None:
        """Do something after a while, in the reactor's thread; from any thread."""
        timer = (monotonic() + seconds, next(self._numbers), task)
        if self.is_current():
            heappush(self._timers, timer)
        else:
            self.call(lambda: heappush(self._timers, timer))

    def register(self, descriptor: HasFileno, serve: Serve, events: int = READABLE) -> None:
        """Call ``serve(events)`` whenever one of the events is there."""
        number = descriptor.fileno()
        self._epoll.register(number, events)
        self._served[number] = serve

    def modify(self, descriptor: HasFileno, events: int) -> None:
        """Wait for other events; also from other threads."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: HasFileno) -> None:
        """Forget a descriptor, before it is closed."""
        number = descriptor.fileno()
        self._epoll.unregister(number)
        del self._served[number]

    # The loop

    def _run(self) -> None:
        while not self._closing:
            for number, events in self._epoll.poll(self._patience()):
                serve = self._served.get(number)
                if serve is not None:  # else it was forgotten by what was served before
                    _guarded(serve, events)
            for _ in range(len(self._tasks)):  # those that they add come after what is ready
                _guarded(self._tasks.popleft())
            while self._timers and self._timers[0][0] <= monotonic():
                _guarded(heappop(self._timers)[2])

    def _patience(self) -> float:
        if self._tasks:
            return 0.0
        if not self._timers:
            return _LONGEST_POLL
        return min(_LONGEST_POLL, max(0.0, self._timers[0][0] - monotonic()))

    def _drain(self) -> None:
        os.eventfd_read(self._wake)


def _guarded(work: Callable[..., None], *arguments: object) -> None:
    """Do something; its failure must not end the thread that serves all."""
    try:
        work(*arguments)
    except Exception:
        log.exception("the reactor could not finish what it was doing")


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
