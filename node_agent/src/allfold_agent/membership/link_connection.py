"""One connection of a link: messages out from any thread, messages in to the reactor."""

from __future__ import annotations

import logging
import socket
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.runtime.locks import make_lock
from allfold_agent.runtime.reactor import HUNG_UP, READABLE, WRITABLE, Reactor
from allfold_core.protocol.frames import FrameError
from allfold_core.protocol.peer_link import MAX_BODY, Hello, LinkReader
from allfold_core.survival.suspicion import PONG_WINDOW_SECONDS, RecentMaximum

if TYPE_CHECKING:
    from allfold_agent.membership.links import PeerLinks


# Answers to older ones are not measured.
_REMEMBERED = 100


class Pings:
    """Numbers the pings to one peer, over all connections to it.

    Attributes:
        last_delay: the seconds to the answer that came last; ``None`` since a connection began.
    """

    def __init__(self) -> None:
        self.last_delay: float | None = None
        self._last = 0
        self._answered = 0
        self._sent: dict[int, float] = {}
        self._delays = RecentMaximum(PONG_WINDOW_SECONDS)

    @property
    def unanswered(self) -> int:
        """The pings that were due since the last one that was answered, sent or not."""
        return self._last - self._answered

    def next(self, now: float) -> int:
        """Return the number of the ping that is due now."""
        self._last += 1
        self._sent[self._last] = now
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return self._last

    def note_answer(self, number: int, now: float) -> None:
        """Note the answer to a ping; any that was never sent is ignored."""
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._answered = max(self._answered, number)
            self.last_delay = now - sent
            self._delays.note(now, self.last_delay)

    def begin_anew(self) -> None:
        """Expect no answer to what went out on an earlier connection."""
        self._answered = self._last
        self._sent.clear()
        self.last_delay = None

    def worst_delay(self, now: float) -> float:
        """Return the longest time to an answer of late."""
        return self._delays.at(now)


log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 * 1024
_READING = READABLE | HUNG_UP
# What may wait for a peer that does not read: any one message, and as much again.
OUTBOX_BYTES = 2 * MAX_BODY


class LinkConnection:
    """A connection to another agent. Sending never waits: what the socket does not take is kept.

    All but :meth:`send` is for the reactor's thread.

    Args:
        owner: told in the reactor's thread of bytes, of whole messages, and of the end.
        connected: belongs to the connection from now on.
        dialled: the node that this agent has dialled, empty where the peer has.

    Attributes:
        peer: the HELLO of the other end, once it has come.
        settled: True once it is, or was, the link.
        last_heard: when the last byte came (monotonic).
    """

    def __init__(
        self, connected: socket.socket, reactor: Reactor, owner: PeerLinks, dialled: str = ""
    ) -> None:
        self.dialled = dialled
        self.peer: Hello | None = None
        self.settled = False
        self.last_heard = float("-inf")
        self._socket = connected
        self._reactor = reactor
        self._owner = owner
        self._reader = LinkReader()
        self._lock = make_lock("link")
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._waits_for_room = False
        self._is_over = False  # nothing is sent any more
        self._is_served = False
        self._closed = False

    def open(self, greeting: bytes, early: bytes) -> None:
        """Say the first words and begin to read; ``early`` is what has come already."""
        self._socket.setblocking(False)
        self._reactor.register(self._socket, self._serve, _READING)
        self._is_served = True
        self.send(greeting)
        if early:
            self._take(early)

    def send(self, message: bytes) -> bool:
        """Send a message, now or as soon as the socket takes it; from any thread.

        Returns:
            False where it will not be sent, because the connection is over.
        """
        with self._lock:
            if self._is_over:
                return False
            if self._outbox_bytes + len(message) > OUTBOX_BYTES:
                log.warning("a link is dropped: its peer has left %d bytes", self._outbox_bytes)
                self._break()
                return False
            self._outbox.append(memoryview(message))
            self._outbox_bytes += len(message)
            if not self._waits_for_room:
                self._flush()
            return True

    def close(self) -> None:
        """End the connection without a word to its owner."""
        if self._closed:
            return
        self._closed = True
        with self._lock:
            self._break()
        if self._is_served and self._reactor.running:
            self._reactor.unregister(self._socket)
        self._socket.close()

    def end(self, reason: str) -> None:
        """Close, and tell the owner why, unless that was done before."""
        if self._closed:
            return
        self.close()
        self._owner.on_end(self, reason)

    # The lock is held

    def _break(self) -> None:
        """Send nothing more. The reactor sees the end of the connection, and closes it."""
        self._is_over = True
        self._outbox.clear()
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        while self._outbox:
            first = self._outbox[0]
            try:
                sent = self._socket.send(first)
            except BlockingIOError:
                break
            except OSError as error:
                log.debug("a link does not take a message: %s", error)
                break  # the reactor is told of the end
            self._outbox_bytes -= sent
            self._outbox[0] = first[sent:]
            if sent == len(first):
                self._outbox.popleft()
        self._wait_for_room(bool(self._outbox))

    def _wait_for_room(self, waits: bool) -> None:
        if waits != self._waits_for_room:
            self._waits_for_room = waits
            with suppress(ValueError):  # the reactor has ended
                self._reactor.modify(self._socket, _READING | WRITABLE if waits else _READING)

    # The reactor's thread

    def _serve(self, events: int) -> None:
        if events & WRITABLE:
            with self._lock:
                if not self._is_over:
                    self._flush()
        if events & ~WRITABLE and not self._closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.end(str(error))
            return
        if data:
            self._take(data)
        else:
            self.end("the connection was closed")

    def _take(self, data: bytes) -> None:
        self.last_heard = monotonic()
        self._owner.on_bytes(self)
        try:
            for message in self._reader.feed(data):
                self._owner.on_message(self, message)
                if self._closed:
                    return
        except FrameError as error:
            log.warning("a link is damaged: %s", error)
            self.end(str(error))
