"""Descriptors and tasks that one thread serves, each as soon as it is ready."""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable
from threading import Lock, get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

log = logging.getLogger(__name__)

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
HUNG_UP = select.EPOLLRDHUP

Serve = Callable[[int], None]
Action = Callable[[], None]


class EventLoop:
    """The descriptors and tasks of one thread. Nothing that it calls may wait.

    All but :meth:`call`, :meth:`close` and :meth:`modify` is for its own thread, or for before
    that starts.

    Args:
        name: of the thread.
        waking: the lock under which it is woken, as it may be closing.

    Attributes:
        wake_descriptor: an eventfd: who writes to it wakes the thread.
    """

    def __init__(self, name: str, waking: Lock) -> None:
        self.name = name
        self.wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self.wake_descriptor, READABLE)
        self._served: dict[int, Serve] = {self.wake_descriptor: self._drain}
        self._tasks: deque[Action] = deque()
        self._closing = False
        self._waking = waking
        self._ident = 0

    @property
    def running(self) -> bool:
        """True until :meth:`close`; after that, tasks are not run."""
        return not self._closing

    def is_current(self) -> bool:
        """Return True in the loop's own thread."""
        return not self._closing and get_ident() == self._ident  # another thread may get the ident

    def call(self, task: Action) -> None:
        """Do something soon, in the loop's thread; from any thread, and without waiting."""
        self._tasks.append(task)
        if not self.is_current():
            with self._waking:
                if not self._closing:
                    self._ensure_thread()
                    os.eventfd_write(self.wake_descriptor, 1)

    def close(self) -> None:
        """End the thread; what is not done by then is not done any more."""
        with self._waking:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self.wake_descriptor, 1)
        self._join(5.0)
        self._epoll.close()
        os.close(self.wake_descriptor)

    def _ensure_thread(self) -> None:
        """Start the thread, if it starts with the first task."""

    def _join(self, seconds: float) -> None:
        """Wait until the thread has ended, if it has begun."""

    def register(
        self, descriptor: FileDescriptorLike, serve: Serve, events: int = READABLE
    ) -> None:
        """Call ``serve(events)`` whenever one of the events is there."""
        self._epoll.register(descriptor, events)
        self._served[_number(descriptor)] = serve

    def modify(self, descriptor: FileDescriptorLike, events: int) -> None:
        """Wait for other events; also from other threads."""
        self._epoll.modify(descriptor, events)

    def unregister(self, descriptor: FileDescriptorLike) -> None:
        """Forget a descriptor, before it is closed."""
        self._epoll.unregister(descriptor)
        del self._served[_number(descriptor)]

    def _serve_ready(self, seconds: float) -> bool:
        """Serve what is there, or comes within so many seconds; return True if there was any."""
        tasks = self._tasks
        ready = self._epoll.poll(0.0 if tasks else seconds)
        for number, events in ready:
            serve = self._served.get(number)
            if serve is not None:  # else it was forgotten by what was served before
                self._guarded(serve, events)
        if not tasks:
            return bool(ready)
        for _ in range(len(tasks)):  # those that they add come after what is ready
            self._guarded(tasks.popleft())
        return True

    def _drain(self, _events: int) -> None:
        os.eventfd_read(self.wake_descriptor)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Do something; its failure must not end the thread that serves all."""
        try:
            work(*arguments)
        except Exception:
            log.exception("the thread %s could not finish what it was doing", self.name)


def _number(descriptor: FileDescriptorLike) -> int:
    return descriptor if isinstance(descriptor, int) else descriptor.fileno()
