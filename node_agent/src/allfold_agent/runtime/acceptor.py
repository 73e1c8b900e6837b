"""Accepting connections in a reactor."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from time import monotonic

from allfold_agent.runtime.reactor import Reactor

log = logging.getLogger(__name__)

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
