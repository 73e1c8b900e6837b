"""The sending end of an edge: takes what is ready, frames it, keeps it until it is acknowledged.

Ops are sent one after the other, each in its dataflow's edge order; so the receiver never waits
for an op whose frames are stuck behind those of a later one.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from time import monotonic

import xxhash

from allfold_agent.buffers import Buffer
from allfold_agent.dataflow import Task, TaskKind
from allfold_agent.exchange import Exchange
from allfold_core.errors import InvalidArgument
from allfold_core.frames import ACK, FrameHeader, FrameType

log = logging.getLogger(__name__)

# Frames up to this size are written by the thread that made them ready, if the socket takes them:
# a hand-over to the edge's thread costs more than the copy into the kernel.
INLINE_BYTES = 32 * 1024
LOOPBACK_BUFFER = 512 * 1024
# How long the receiver tries to open an edge again that has broken.
RECONNECT_SECONDS = 1.0
# From so many frames on that nobody has acknowledged, it is worth a look.
_MANY_UNACKED = 64
_ACKS_AT_ONCE = ACK.size * 512


@dataclass(slots=True)
class Outgoing:
    """One op's part of an edge."""

    exchange: Exchange
    seq: int
    fingerprint: int


@dataclass(slots=True)
class Frame:
    """A frame that may have to be sent again."""

    number: int
    op: Outgoing
    task: Task
    buffer: Buffer | None
    header: bytes = b""
    payload: memoryview | bytes = b""
    counted: bool = False


@dataclass
class EdgeCounters:
    """Payload traffic of one direction, without headers and without frames sent again."""

    payload_bytes: int = 0
    frames: int = 0


def tune(connected: socket.socket) -> None:
    """Set the socket buffers where the kernel's own choice is a bad one.

    Between machines the kernel adapts them to the link. On loopback there is no link to fill, and
    what is queued beyond the caches is fetched from memory again: half a MiB was fastest.
    """
    if connected.family == socket.AF_UNIX:
        return
    host = connected.getpeername()[0]
    if host.startswith("127.") or host == "::1":
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


class OutEdge:
    """Everything that this node sends to one other node of a group."""

    def __init__(self, destination: int, epoch: int, name: str) -> None:
        self.destination = destination
        self.counters = EdgeCounters()
        self._epoch = epoch
        self._ready = Condition()
        self._ops: deque[Outgoing] = deque()
        self._unacked: deque[Frame] = deque()
        self._resend: deque[Frame] = deque()
        self._next_number = 0
        self._socket: socket.socket | None = None
        self._lost_at = float("-inf")
        self._crosses_a_wire = True
        self._ack_rest = b""
        self._busy = False
        self._closed = False
        self._thread = Thread(target=self._run, name=f"allfold-send-{name}", daemon=True)
        self._thread.start()

    # What the group calls

    def enqueue(self, outgoing: Outgoing) -> None:
        """Append an op; called in the order of the ops."""
        with self._ready:
            self._ops.append(outgoing)

    def kick(self) -> None:
        """Something may have become ready: send it, here if that is quick."""
        with self._ready:
            if self._busy:
                # The busy thread looks again before it rests, so nothing is forgotten.
                return
            connected = self._socket
            if connected is None:
                return
            self._busy = True
        self._send_small(connected)

    def wake(self) -> None:
        """An op has failed: what is queued behind it may be ready. Sends nothing here and now."""
        with self._ready:
            self._ready.notify_all()

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection that wants everything from a frame on; returns its taker."""
        with self._ready:
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
        with self._ready:
            while self._unsent_or_unacked():
                left = deadline - monotonic()
                if self._socket is None:
                    left = min(left, self._lost_at + RECONNECT_SECONDS - monotonic())
                if left <= 0:
                    return
                self._ready.wait(timeout=min(0.2, left))

    def close(self) -> None:
        """End, whatever is still queued."""
        with self._ready:
            self._closed = True
            self._drop_socket()
            self._ready.notify_all()
        self._thread.join(timeout=2.0)
        with self._ready:
            self._release_acknowledged(self._next_number)

    # Connection

    def _take(self, connected: socket.socket, from_frame: int) -> None:
        tune(connected)
        with self._ready:
            if self._closed:
                connected.close()
                return
            self._drop_socket()
            self._ack_rest = b""
            self._release_acknowledged(from_frame)
            self._resend = deque(self._unacked)
            self._socket = connected
            # Between two processes of one machine there is nothing that could damage a payload.
            self._crosses_a_wire = connected.family != socket.AF_UNIX
            self._ready.notify_all()

    def _drop_socket(self) -> None:
        if self._socket is not None:
            # Shut down first: it wakes a thread that is sending on it.
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("edge to node %d was gone already: %s", self.destination, error)
            self._socket.close()
            self._socket = None
            self._lost_at = monotonic()

    def _lost(self, connected: socket.socket, error: OSError) -> None:
        with self._ready:
            if self._socket is connected:
                log.info("edge to node %d broke, waiting for it: %s", self.destination, error)
                self._drop_socket()

    # Sending

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._closed and (self._busy or not self._has_work()):
                    self._ready.wait(timeout=5.0)
                    self._drain_acks()
                if self._closed:
                    return
                self._busy = True
                connected = self._socket
            self._send_all(connected)

    def _has_work(self) -> bool:
        return self._socket is not None and (bool(self._resend) or self._head_ready())

    def _head_ready(self) -> bool:
        self._skip_finished()
        return bool(self._ops) and self._ops[0].exchange.peek_send(self.destination)

    def _skip_finished(self) -> None:
        while self._ops and self._ops[0].exchange.all_sent(self.destination):
            self._ops.popleft()

    def _send_small(self, connected: socket.socket) -> None:
        """Send what is ready while it is small and the socket takes it; leave the rest."""
        while True:
            with self._ready:
                frame = None
                if len(self._unacked) >= _MANY_UNACKED:
                    self._drain_acks()
                if connected is self._socket and not self._resend and self._head_is_small():
                    frame = self._next_frame()
                if frame is None:
                    self._busy = False
                    if self._has_work():
                        self._ready.notify_all()
                    return
            self._fill(frame)
            if not self._write(connected, frame, socket.MSG_DONTWAIT):
                self._rest()
                return
            self._sent(frame)

    def _write(self, connected: socket.socket, frame: Frame, flags: int = 0) -> bool:
        """Write a frame whole; where the connection breaks it is kept for a new one."""
        try:
            try:
                sent = connected.sendmsg([frame.header, frame.payload], [], flags)
            except BlockingIOError:
                sent = 0
            for part in (memoryview(frame.header), memoryview(frame.payload)):
                if sent < len(part):
                    connected.sendall(part[sent:])
                sent = max(0, sent - len(part))
        except OSError as error:
            self._lost(connected, error)
            return False
        return True

    def _send_all(self, connected: socket.socket | None) -> None:
        """Send until nothing is ready or the connection breaks."""
        while connected is not None:
            with self._ready:
                if connected is not self._socket:
                    break
                self._drain_acks()
                frame = self._resend.popleft() if self._resend else self._next_frame()
            if frame is None:
                break
            self._fill(frame)
            if not self._write(connected, frame):
                break
            self._sent(frame)
        self._rest()

    def _rest(self) -> None:
        with self._ready:
            self._busy = False
            self._ready.notify_all()

    def _head_is_small(self) -> bool:
        self._skip_finished()
        if not self._ops:
            return False
        task = self._ops[0].exchange.next_send(self.destination)
        return task is None or self._ops[0].exchange.nbytes(task) <= INLINE_BYTES

    def _next_frame(self) -> Frame | None:
        self._skip_finished()
        if not self._ops:
            return None
        op = self._ops[0]
        taken = op.exchange.take_send(self.destination)
        if taken is None:
            return None
        frame = Frame(self._next_number, op, *taken)
        self._unacked.append(frame)
        self._next_number += 1
        return frame

    def _fill(self, frame: Frame) -> None:
        """Give a frame its bytes; outside the lock, because the digest takes its time."""
        if frame.header:
            return
        op, task = frame.op, frame.task
        signal = task.kind is TaskKind.SIGNAL
        assert frame.buffer is not None
        frame.payload = b"" if signal else op.exchange.payload(task, frame.buffer)
        if signal or task.snapshot:
            frame.payload = bytes(frame.payload)
            frame.buffer.release()
            frame.buffer = None
        frame.header = FrameHeader(
            type=FrameType.SIGNAL if signal else FrameType.DATA,
            epoch=self._epoch,
            number=frame.number,
            seq=op.seq,
            offset=task.start,
            length=len(frame.payload),
            fingerprint=op.fingerprint,
            digest=xxhash.xxh3_64_intdigest(frame.payload) if self._crosses_a_wire else 0,
        ).pack()

    def _sent(self, frame: Frame) -> None:
        if frame.counted:
            return
        frame.counted = True
        self.counters.payload_bytes += len(frame.payload)
        self.counters.frames += 1
        frame.op.exchange.complete(frame.task)

    # Acknowledgements

    def _unsent_or_unacked(self) -> bool:
        self._drain_acks()
        self._skip_finished()
        return bool(self._ops) or bool(self._unacked)

    def _drain_acks(self) -> None:
        """Read what the receiver has acknowledged so far, without waiting."""
        while self._socket is not None and self._unacked:
            try:
                data = self._socket.recv(_ACKS_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("no acknowledgements from node %d: %s", self.destination, error)
                return
            if not data:
                return
            self._note_acks(self._ack_rest + data)

    def _note_acks(self, data: bytes) -> None:
        whole = len(data) - len(data) % ACK.size
        self._ack_rest = data[whole:]
        if whole:
            (expected,) = ACK.unpack_from(data, whole - ACK.size)
            self._release_acknowledged(expected)

    def _release_acknowledged(self, expected: int) -> None:
        while self._unacked and self._unacked[0].number < expected:
            frame = self._unacked.popleft()
            if frame.buffer is not None:
                frame.buffer.release()
        self._resend = deque(frame for frame in self._resend if frame.number >= expected)
