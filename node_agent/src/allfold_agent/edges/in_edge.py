"""The receiving end of an edge: opens it, again where it breaks, and ends it.

It has a thread only while it is being opened; the reactor receives its frames.
"""

from __future__ import annotations

import logging
import socket
from functools import partial
from threading import Event
from time import monotonic

from allfold_agent.edges.connections import EdgeCounters
from allfold_agent.edges.incoming import IncomingFrames
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.opening import Dial, EdgeOpener
from allfold_agent.edges.received_files import MissingFile
from allfold_agent.edges.receivers import Receiver
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import AllfoldError, PeerLost, ServiceError
from allfold_core.protocol.frames import FrameError

log = logging.getLogger(__name__)

# How long a thread to open the edge again is tried to be started, and how often.
_THREAD_SECONDS = 30.0
_THREAD_RETRY_SECONDS = 0.2
_CLOSE_SECONDS = 2.0


class InEdge:
    """Everything that this node receives from one other node of a group.

    Args:
        source: the name of that node.
        name: of the edge, for messages.
        dial: opens the edge from a frame number on: (socket, bytes received already).
        receiver: what it delivers to.
        reactor: in whose thread it receives.

    Raises:
        ServiceError: no thread can be started to open it.
    """

    def __init__(
        self,
        source: str,
        name: str,
        dial: Dial,
        receiver: Receiver,
        reactor: Reactor,
    ) -> None:
        self.source = source
        self._name = name
        self._receiver = receiver
        self._reactor = reactor
        self._closed = Event()
        self._ended = Event()
        self._opener = EdgeOpener(name, dial, self._closed)
        self._takes_files = True
        self._frames = IncomingFrames(source, name, receiver, reactor, self._broke)
        self._start_dialling()

    @property
    def counters(self) -> EdgeCounters:
        """The traffic."""
        return self._frames.counters

    @property
    def received(self) -> int:
        """The number of frames that have arrived."""
        return self._frames.expected

    @property
    def last_heard(self) -> float:
        """The time of the last byte from the peer (monotonic); ``-inf`` if there was none."""
        return self._frames.last_heard

    @property
    def rate(self) -> LinkRate:
        """The rate at which the peer sends, measured on long payloads."""
        return self._frames.rate

    def resume(self) -> None:
        """Try a waiting frame again; from any thread."""
        self._frames.resume()

    def close(self) -> None:
        """End; what was not received stays unreceived. From any thread.

        Nothing is delivered any more when this returns, but to the reactor's own thread.
        """
        self._closed.set()
        self._reactor.call(self._end)
        if not self._reactor.is_current():
            deadline = monotonic() + _CLOSE_SECONDS
            while self._reactor.running and monotonic() < deadline:
                if self._ended.wait(timeout=_THREAD_RETRY_SECONDS):
                    return
            if not self._reactor.running:
                self._end()

    def _end(self) -> None:
        self._frames.close()
        self._ended.set()

    # Opening

    def _start_dialling(self) -> None:
        self._opener.open_in_thread(self._frames.expected, self._reactor, self._take, self._lose)

    # In the reactor's thread

    def _lose(self, error: AllfoldError) -> None:
        if not self._closed.is_set():
            self._receiver.edge_lost(self.source, error)

    def _take(self, connected: socket.socket, early: bytes) -> None:
        if self._closed.is_set():
            connected.close()
        else:
            self._frames.open(connected, early, takes_files=self._takes_files)

    def _broke(self, error: Exception) -> None:
        """Open the edge again after its connection has ended, unless that is of no use."""
        try:
            self._note_break(error)
        except AllfoldError as lost:
            self._lose(lost)
        except Exception as failure:
            log.exception("edge %s failed", self._name)
            self._lose(PeerLost(f"edge {self._name} failed: {failure}"))
        else:
            self._dial_again(monotonic() + _THREAD_SECONDS)

    def _note_break(self, error: Exception) -> None:
        """Raise an exception after which the edge is not opened again."""
        expected = self._frames.expected
        match error:
            case MissingFile():
                log.warning("edge %s takes payloads in its connection: %s", self._name, error)
                self._takes_files = False
            case FrameError():
                self._opener.note_damage(expected, error)
            case OSError() | EOFError():
                # Mostly the end of the group. Else it is opened again, or reported as lost.
                log.debug("edge %s ended after frame %d: %s", self._name, expected, error)
            case _:
                raise error

    def _dial_again(self, deadline: float) -> None:
        """Open the edge again, as soon as there is a thread for it."""
        if self._closed.is_set():
            return
        try:
            self._start_dialling()
        except ServiceError as error:
            if monotonic() > deadline:
                self._lose(error)
            else:
                again = partial(self._dial_again, deadline)
                self._reactor.later(_THREAD_RETRY_SECONDS, again)
