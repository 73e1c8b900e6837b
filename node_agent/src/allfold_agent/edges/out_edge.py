"""The sending end of an edge: frames what is ready and keeps it until it is acknowledged.

Sources (the parts of ops, or point-to-point messages) are sent one after the other, each in an
order of its own; so the receiver never waits for an op whose frames are stuck behind those of a
later one. Urgent sources go ahead of sources that have not begun, and between the frames of one
that has.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from threading import Condition
from time import monotonic

import xxhash

from allfold_agent.edges.connections import (
    RECONNECT_SECONDS,
    EdgeCounters,
    OutConnection,
    await_bytes,
)
from allfold_agent.edges.outgoing import OutgoingFrame, PayloadSource, SendQueue
from allfold_agent.runtime.locks import make_rlock
from allfold_agent.runtime.threads import start_thread
from allfold_core.errors import InvalidArgument, PeerLost
from allfold_core.protocol.frames import FrameHeader

log = logging.getLogger(__name__)

# Frames up to this size are written by the thread that made them ready, if the socket takes them:
# a hand-over to the edge's thread costs more than the copy into the kernel.
INLINE_MESSAGE_BYTES = 256 * 1024
# From so many frames on that nobody has acknowledged, it is worth a look.
_MANY_UNACKED = 64


class OutEdge:
    """Everything that this node sends to one other node of a group, in all its epochs.

    Args:
        destination: the name of that node.
        name: of the edge, for messages.

    Raises:
        ServiceError: no thread can be started for it.
    """

    def __init__(self, destination: str, name: str) -> None:
        self.destination = destination
        self.counters = EdgeCounters()
        self._lock = make_rlock("out edge")
        self._ready = Condition(self._lock)
        self._queue = SendQueue()
        self._unacked: deque[OutgoingFrame] = deque()
        self._resend: deque[OutgoingFrame] = deque()
        self._partial: tuple[OutgoingFrame, int] | None = None
        self._next_number = 0
        self._connection: OutConnection | None = None
        self._broke_at: float | None = None
        self._lost_at = monotonic()  # one that was never opened may be opened yet
        self._dropped: list[OutConnection] = []
        self._busy = False
        self._closed = False
        self._thread = start_thread(self._run, f"allfold-send-{name}")

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
        """Send what has become ready: in this thread if that is quick, else in the edge's own."""
        with self._lock:
            if self._busy:
                # The busy thread looks again before it rests, so nothing is forgotten.
                return
            connection = self._connection
            if connection is None:
                return
            self._busy = True
        self._send_small(connection)

    def wake(self) -> None:
        """Wake the sending thread, because an op has failed and those behind it may be ready."""
        with self._lock:
            self._ready.notify_all()

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection that wants everything from a frame on; returns its taker."""
        with self._lock:
            if self._closed:
                raise PeerLost("this edge is closed: its node has ended the group")
            oldest = self._unacked[0].number if self._unacked else self._next_number
            if not oldest <= from_frame <= self._next_number:
                raise InvalidArgument(
                    f"this edge can resume from frames {oldest} to {self._next_number}, "
                    f"not from {from_frame}"
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
                connection, left = self._connection, deadline - monotonic()
                if connection is None:
                    left = min(left, self._lost_at + RECONNECT_SECONDS - monotonic())
                if left <= 0:
                    return
                if connection is None:
                    self._ready.wait(timeout=left)
            if connection is not None:
                await_bytes(connection.socket, min(0.2, left))

    def close(self) -> None:
        """End, whatever is still queued."""
        with self._lock:
            self._closed = True
            self._drop_connection()
            self._ready.notify_all()
        self._thread.join(timeout=2.0)
        with self._lock:
            for frame in self._unacked:
                if frame.content.is_shared:
                    # The receiver may yet read it, so it must not be used again. It goes when
                    # nobody has it mapped any more.
                    frame.content.buffer = None
            self._release_acknowledged(self._next_number)

    # Connection

    def _take(self, connected: socket.socket, from_frame: int) -> None:
        connection = OutConnection(connected, from_frame)
        with self._lock:
            if self._closed:
                connected.close()
                return
            self._drop_connection()
            self._release_acknowledged(from_frame)
            if self._broke_at is not None:
                seconds, self._broke_at = monotonic() - self._broke_at, None
                log.info("edge to node %s is back, after %.1f s", self.destination, seconds)
            self._resend = deque(self._unacked)
            self._partial = None
            self._connection = connection
            self._ready.notify_all()

    def _drop_connection(self) -> None:
        connection = self._connection
        if connection is not None:
            # Shut down first: it wakes a thread that is sending on it.
            try:
                connection.shut_down()
            except OSError as error:
                log.debug("edge to node %s was gone already: %s", self.destination, error)
            self._dropped.append(connection)
            self._connection = None
            self._lost_at = monotonic()
            if not self._busy:
                self._close_dropped()

    def _close_dropped(self) -> None:
        """Close sockets on which nobody writes any more: their numbers are soon used again."""
        while self._dropped:
            self._dropped.pop().socket.close()

    def _lost(self, connection: OutConnection, error: OSError) -> None:
        with self._lock:
            if self._connection is connection:
                log.info("edge to node %s broke, waiting for it: %s", self.destination, error)
                self._broke_at = monotonic()
                self._drop_connection()

    # Sending

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (self._busy or not self._has_work()):
                    self._ready.wait(timeout=5.0)
                    self._drain_acks()
                if self._closed:
                    return
                self._busy = True
                connection = self._connection
            self._send_all(connection)

    def _has_work(self) -> bool:
        unfinished = self._partial is not None or bool(self._resend)
        return self._connection is not None and (unfinished or self._head_ready())

    def _head_ready(self) -> bool:
        head = self._queue.head()
        return head is not None and head.is_ready()

    def _send_small(self, connection: OutConnection) -> None:
        """Send what is ready while it is small and the socket takes it; leave the rest.

        The rest of a frame too: whoever calls this may be the thread that must receive before the
        other node can go on receiving.
        """
        while True:
            with self._lock:
                if len(self._unacked) >= _MANY_UNACKED or connection.awaits_word:
                    self._drain_acks()
                frame, head = None, self._queue.head()
                idle = self._partial is None and not self._resend
                if head is not None and idle and connection is self._connection:
                    frame = self._frame_of(head) if _is_quick(head, connection) else None
                if frame is None:
                    self._busy = False
                    self._close_dropped()
                    if not idle or (head is not None and head.is_ready()):
                        self._ready.notify_all()
                    return
            self._fill(frame, connection)
            try:
                sent = connection.write_some(frame)
            except OSError as error:
                self._lost(connection, error)
                sent = 0
            if sent < len(frame.header) + len(frame.payload):
                with self._lock:
                    if connection is self._connection:
                        self._partial = frame, sent
                self._rest()
                return
            self._sent(frame)

    def _send_all(self, connection: OutConnection | None) -> None:
        """Send until nothing is ready or the connection breaks."""
        while connection is not None:
            with self._lock:
                if connection is not self._connection:
                    break
                self._drain_acks()
                frame, sent = self._unfinished()
            if frame is None:
                break
            self._fill(frame, connection)
            try:
                connection.write_rest(frame, sent)
            except OSError as error:  # the frame is kept for a new connection
                self._lost(connection, error)
                break
            self._sent(frame)
        self._rest()

    def _unfinished(self) -> tuple[OutgoingFrame | None, int]:
        """The frame to be sent next, and how much of it has been."""
        if self._partial is not None:
            partial, self._partial = self._partial, None
            return partial
        return (self._resend.popleft() if self._resend else self._next_frame()), 0

    def _rest(self) -> None:
        with self._lock:
            self._busy = False
            self._close_dropped()
            self._ready.notify_all()

    def _next_frame(self) -> OutgoingFrame | None:
        head = self._queue.head()
        return None if head is None else self._frame_of(head)

    def _frame_of(self, head: PayloadSource) -> OutgoingFrame | None:
        """The next frame of a source; ``None`` where it is not ready."""
        content = head.take()
        if content is None:
            return None
        frame = OutgoingFrame(self._next_number, head, content)
        self._unacked.append(frame)
        self._next_number += 1
        return frame

    def _fill(self, frame: OutgoingFrame, connection: OutConnection) -> None:
        """Give a frame its bytes; outside the lock, because the digest takes its time.

        Between two processes of one machine there is nothing that could damage a payload.
        """
        if frame.header:
            return
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
            digest=xxhash.xxh3_64_intdigest(frame.payload) if connection.crosses_a_wire else 0,
            behind=frame.source.behind,
        )
        frame.header = frame.head.pack()

    def _sent(self, frame: OutgoingFrame) -> None:
        if frame.counted:
            return
        frame.counted = True
        self.counters.payload_bytes += len(frame.payload)
        self.counters.frames += 1
        frame.content.sent()

    # Acknowledgements

    def acknowledged(self) -> int:
        """Return the number of frames that the receiver is known to have."""
        with self._lock:
            self._drain_acks()
            return self._unacked[0].number if self._unacked else self._next_number

    def last_heard(self) -> float:
        """Return when the receiver last acknowledged something (monotonic); ``-inf`` if unknown."""
        with self._lock:
            self._drain_acks()
            return float("-inf") if self._connection is None else self._connection.last_heard

    def _unsent_or_unacked(self) -> bool:
        self._drain_acks()
        return self._queue.head() is not None or bool(self._unacked)

    def _drain_acks(self) -> None:
        """Read what the receiver has acknowledged so far, without waiting."""
        while self._connection is not None and (self._unacked or self._connection.awaits_word):
            try:
                expected = self._connection.read_ack()
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("no acknowledgements from node %s: %s", self.destination, error)
                self._drop_connection()
                return
            if expected is not None:
                self._note_ack(expected)

    def _note_ack(self, expected: int) -> None:
        if expected <= self._next_number:
            self._release_acknowledged(expected)
            return
        log.warning(
            "edge to node %s: an acknowledgement of frame %d, which was never sent",
            self.destination,
            expected - 1,
        )
        self._drop_connection()

    def _release_acknowledged(self, expected: int) -> None:
        while self._unacked and self._unacked[0].number < expected:
            frame = self._unacked.popleft()
            if frame.content.buffer is not None:
                frame.content.buffer.release()
        self._resend = deque(frame for frame in self._resend if frame.number >= expected)


def _is_quick(source: PayloadSource, connection: OutConnection) -> bool:
    """Return True if the next payload is short, or only its place is sent."""
    if connection.takes_files and source.next_is_shared():
        return True
    return source.next_size() <= INLINE_MESSAGE_BYTES
