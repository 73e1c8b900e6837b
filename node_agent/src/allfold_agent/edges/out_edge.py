"""The sending end of an edge: frames what is ready and keeps it until it is acknowledged.

Sources (the parts of ops, or point-to-point messages) are sent one after the other, each in an
order of its own; so the receiver never waits for an op whose frames are stuck behind those of a
later one. Urgent sources go ahead of sources that have not begun, and between the frames of one
that has.

It has no thread. Whoever makes something ready writes what the socket takes; the reactor goes on
when there is room again.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Condition
from time import monotonic

from allfold_agent.edges.connections import RECONNECT_SECONDS, EdgeCounters
from allfold_agent.edges.out_connection import OutConnection
from allfold_agent.edges.outgoing import OutgoingFrame, PayloadSource, SendQueue, SentFrames
from allfold_agent.runtime.locks import make_rlock
from allfold_agent.runtime.reactor import WRITABLE, Reactor
from allfold_agent.traffic.line import Sender
from allfold_core.errors import InvalidArgument, PeerLost
from allfold_core.protocol.frames import FrameHeader

log = logging.getLogger(__name__)

# After so much it is the turn of others: whoever has made frames ready must not be kept for long.
_TURN_BYTES = 1 << 20
# However short a frame is, it takes as long as to write so much.
_LEAST_BYTES = 16 * 1024
# So often a frame may fail to be made.
_MOST_FAILURES = 5
# Acknowledgements are read when there may be so many, before a frame so long, and so often.
_MANY_UNACKED = 64
_LONG_BYTES = 64 * 1024
_LOOK_SECONDS = 1.0
# A receiver on this machine says within so long whether it takes files.
_WORD_SECONDS = 0.02
_CLOSE_SECONDS = 2.0
# Whoever waits for the last ones looks so often, also where the reactor has ended.
_FINISH_SECONDS = 0.2


class OutEdge:
    """Everything that this node sends to one other node of a group, in all its epochs.

    Args:
        destination: the name of that node.
        reactor: writes what a socket does not take at once, and reads acknowledgements.
        sender: has its connections paced; ``None``: they are not.
    """

    def __init__(self, destination: str, reactor: Reactor, sender: Sender | None = None) -> None:
        self.destination = destination
        self.counters = EdgeCounters()
        self._lock = make_rlock("out edge")
        self._changed = Condition(self._lock)
        self._queue = SendQueue()
        self._frames = SentFrames()
        self._partial: OutgoingFrame | None = None
        self._connection: OutConnection | None = None
        self._broke_at: float | None = None
        self._lost_at = monotonic()  # one that was never opened may be opened yet
        self._dropped: list[OutConnection] = []
        self._busy = False
        self._failures = 0
        self._closed = False
        self._look_is_due = False
        self._reactor = reactor
        self._sender = sender

    @property
    def connected(self) -> socket.socket | None:
        """The connection on which it sends, if there is one. From any thread."""
        connection = self._connection
        return None if connection is None else connection.socket

    # What the group calls

    def enqueue(self, source: PayloadSource, *, urgent: bool = False) -> None:
        """Append what is to be sent; ops are appended in their order.

        Args:
            urgent: goes ahead of all sources that are not urgent; for few bytes, whose order
                relative to the others does not matter.
        """
        with self._lock:
            self._queue.add(source, urgent=urgent)

    def cancel(self, cancel: Callable[[], bool]) -> bool:
        """Cancel a source that is queued; return what that returns.

        No frame of it is taken meanwhile: that happens under the same lock.
        """
        with self._lock:
            return cancel()

    def kick(self) -> None:
        """Send what has become ready, as far as the socket takes it. From any thread."""
        with self._lock:
            connection = self._connection
            if self._busy or connection is None or connection.waits:
                # The busy thread looks again before it rests, so nothing is forgotten.
                return
            self._busy = True
        try:
            self._send()
        except Exception:  # noqa: BLE001 - it is logged there
            self._fail()

    def _fail(self) -> None:
        """Go on after a frame could not be made, or what follows from it: on a new connection.

        Else nothing would be sent any more, whatever else waits. A frame that cannot be made at all
        leaves the peer without a connection, and its op comes to its deadline.
        """
        log.exception("edge to node %s: a frame cannot be sent", self.destination)
        with self._lock:
            self._failures += 1
            self._drop_connection()
            self._rest()

    def wake(self) -> None:
        """Have the reactor send what has become ready, and let go of what has arrived."""
        self._reactor.call(self._look_around)

    def _look_around(self) -> None:
        with self._lock:
            self._drain_acks()
        self.kick()

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection that wants everything from a frame on; returns its taker."""
        with self._lock:
            if self._closed:
                raise PeerLost("this edge is closed: its node has ended the group")
            if self._failures > _MOST_FAILURES:
                raise PeerLost(
                    f"node {self.destination} cannot be sent the next frame of this edge"
                )
            oldest, newest = self._frames.oldest, self._frames.next_number
            if not oldest <= from_frame <= newest:
                raise InvalidArgument(
                    f"this edge can resume from frames {oldest} to {newest}, not from {from_frame}"
                )
        return lambda connected: self._take(connected, from_frame)

    def finish(self, deadline: float) -> None:
        """Wait until what is queued is sent and acknowledged, or ``deadline`` (monotonic).

        A connection that has just broken may come back; one that does not is not waited for.
        """
        while True:
            with self._lock:
                if not self._unsent_or_unacked():
                    return
                left = deadline - monotonic()
                if self._connection is None:
                    left = min(left, self._lost_at + RECONNECT_SECONDS - monotonic())
                if left <= 0:
                    return
                if self._connection is not None:
                    self._connection.listen()
                self._changed.wait(timeout=min(_FINISH_SECONDS, left))

    def close(self) -> None:
        """End, whatever is still queued."""
        with self._lock:
            self._closed = True
            self._drop_connection()
            # Who writes fails now, and must not find the memory gone.
            self._changed.wait_for(lambda: not self._busy, timeout=_CLOSE_SECONDS)
            self._frames.release_all()

    # Connection

    def _take(self, connected: socket.socket, from_frame: int) -> None:
        with self._lock:
            if self._closed:
                connected.close()
                return
            self._drop_connection()
            self._frames.release(from_frame)
            if self._broke_at is not None:
                seconds, self._broke_at = monotonic() - self._broke_at, None
                log.info("edge to node %s is back, after %.1f s", self.destination, seconds)
            self._frames.resend = deque(self._frames.unacked)
            self._partial = None
            connection = OutConnection(
                connected, from_frame, self._reactor, self._serve, self._sender
            )
            self._connection = connection
            self._changed.notify_all()
        if connection.waits:  # for a word that does not come where files do not pass
            self._reactor.later(_WORD_SECONDS, partial(self._go_on, connection))
        self.kick()

    def _go_on(self, connection: OutConnection) -> None:
        with self._lock:
            connection.waits = False
        self.kick()

    def _drop_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            # Shut down first: the peer sees it, and a thread that is writing on it.
            try:
                connection.shut_down()
            except OSError as error:
                log.debug("edge to node %s was gone already: %s", self.destination, error)
            self._dropped.append(connection)
            self._connection = None
            self._lost_at = monotonic()
            self._changed.notify_all()
            if not self._busy:
                self._close_dropped()

    def _close_dropped(self) -> None:
        """Close sockets on which nobody writes any more: their numbers are soon used again."""
        while self._dropped:
            self._dropped.pop().close()

    def _lost(self, connection: OutConnection, error: OSError) -> None:
        with self._lock:
            if self._connection is not connection:
                return
            if self._frames.unacked or self._queue.head() is not None:
                log.info("edge to node %s broke, waiting for it: %s", self.destination, error)
                self._broke_at = monotonic()
            else:  # mostly the end of the group
                log.debug("edge to node %s ended: %s", self.destination, error)
            self._drop_connection()

    # Sending

    def _serve(self, connection: OutConnection, events: int) -> None:
        """Do what a connection asks for; in the reactor's thread."""
        with self._lock:
            if connection is not self._connection:
                connection.ignore()  # whoever writes on it closes it
                return
            had_word = not connection.awaits_word
            if events & ~WRITABLE:
                self._drain_acks()
        if events & WRITABLE or not (had_word or connection.awaits_word):
            self._go_on(connection)

    def _send(self) -> None:
        """Send until nothing is ready, the socket is full or the turn is over."""
        left = _TURN_BYTES
        while left > 0:
            with self._lock:
                connection = self._connection
                frame = None if connection is None else self._unfinished()
                if connection is None or frame is None:
                    self._rest()
                    return
            head = frame.head or self._fill(frame, connection)
            try:
                if connection.unsent:
                    written = connection.go_on(left)
                else:
                    written = connection.write(head, frame.payload, frame.place, left)
            except OSError as error:  # the frame is kept for a new connection
                self._lost(connection, error)
                continue
            left -= max(written, _LEAST_BYTES)
            if not connection.unsent:
                self._sent(frame)
            elif not self._keep(connection, frame, is_full=left > 0):
                return
        with self._lock:
            self._rest()
        self.wake()

    def _keep(self, connection: OutConnection, frame: OutgoingFrame, *, is_full: bool) -> bool:
        """Keep the rest of a frame for later; return False where there is no room for more."""
        with self._lock:
            if connection is not self._connection:
                return True  # to the new one all of it is sent again
            self._partial = frame
            if is_full:
                connection.await_room()
                self._rest()
            return not is_full

    def _unfinished(self) -> OutgoingFrame | None:
        """The frame to be sent next, or whose rest is."""
        if self._partial is not None:
            partial, self._partial = self._partial, None
            return partial
        if self._frames.resend:
            return self._frames.resend.popleft()
        head = self._queue.head()
        if head is None:
            return None
        if len(self._frames.unacked) >= _MANY_UNACKED or head.next_size() >= _LONG_BYTES:
            self._drain_acks()
        return self._frames.take(head)

    def _rest(self) -> None:
        self._busy = False
        self._look_later()
        self._close_dropped()
        if self._closed:
            self._changed.notify_all()

    def _fill(self, frame: OutgoingFrame, connection: OutConnection) -> FrameHeader:
        """Give a frame its bytes and return its header; outside the lock, as that takes a while."""
        content = frame.content
        frame.payload = content.read()
        if content.buffer is not None and isinstance(frame.payload, bytes):
            content.buffer.release()
            content.buffer = None
        frame.head = FrameHeader(
            type=content.type,
            stamp=frame.source.stamp,
            number=frame.number,
            seq=frame.source.seq,
            offset=content.offset,
            length=len(frame.payload),
            fingerprint=frame.source.fingerprint,
            digest=connection.digest(frame.payload),
            behind=frame.source.behind,
        )
        return frame.head

    def _sent(self, frame: OutgoingFrame) -> None:
        if frame.counted:
            return
        frame.counted = True
        self.counters.add(len(frame.payload))
        frame.content.sent()

    # Acknowledgements. Memory waits for them, but each by itself is not worth being woken for.

    def _look_later(self) -> None:
        if self._frames.unacked and not self._look_is_due:
            self._look_is_due = True
            self._reactor.later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        with self._lock:
            self._look_is_due = False
            self._drain_acks()
            self._look_later()

    def acknowledged(self) -> int:
        """Return the number of frames that the receiver is known to have."""
        with self._lock:
            self._drain_acks()
            return self._frames.oldest

    def last_heard(self) -> float:
        """Return when the receiver last acknowledged something (monotonic); ``-inf`` if unknown."""
        with self._lock:
            self._drain_acks()
            return float("-inf") if self._connection is None else self._connection.last_heard

    def _unsent_or_unacked(self) -> bool:
        self._drain_acks()
        return self._queue.head() is not None or bool(self._frames.unacked)

    def _drain_acks(self) -> None:
        """Read what the receiver has acknowledged so far, without waiting."""
        while self._connection is not None:
            try:
                expected = self._connection.read_ack()
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(self._connection, error)
                return
            if expected is not None:
                self._note_ack(expected)

    def _note_ack(self, expected: int) -> None:
        if expected <= self._frames.next_number:
            self._frames.release(expected)
            if not self._frames.unacked:
                self._changed.notify_all()  # somebody may wait for that
            return
        log.warning(
            "edge to node %s: an acknowledgement of frame %d, which was never sent",
            self.destination,
            expected - 1,
        )
        self._drop_connection()
