"""The sending end of an edge: takes what is ready, frames it, keeps it until it is acknowledged.

Cargoes (the parts of ops, or point-to-point messages) are sent one after the other, each in an
order of its own; so the receiver never waits for an op whose frames are stuck behind those of a
later one.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, RLock, Thread
from time import monotonic
from typing import Protocol

import xxhash

from allfold_agent.buffers import Buffer
from allfold_core.errors import InvalidArgument, PeerLost
from allfold_core.frames import ACK, FrameHeader, FrameType

log = logging.getLogger(__name__)

# Frames up to this size are written by the thread that made them ready, if the socket takes them:
# a hand-over to the edge's thread costs more than the copy into the kernel.
INLINE_BYTES = 256 * 1024
# A Unix socket takes a longer piece several times more slowly.
PIECE_BYTES = 256 * 1024
LOOPBACK_BUFFER = 512 * 1024
# How long the receiver tries to open an edge again that has broken.
RECONNECT_SECONDS = 1.0
# From so many frames on that nobody has acknowledged, it is worth a look.
_MANY_UNACKED = 64
_ACKS_AT_ONCE = ACK.size * 512


@dataclass(slots=True)
class Load:
    """What goes into one frame.

    Attributes:
        offset: what the frame's header says.
        payload: called once, outside of all locks, for the bytes.
        sent: called once, when the frame has been written.
        buffer: memory that is held until the frame is acknowledged; ``None`` where the payload
            lasts by itself.
        place: where the payload begins in the buffer's file, in bytes.
    """

    type: FrameType
    offset: int
    payload: Callable[[], memoryview | bytes]
    sent: Callable[[], None]
    buffer: Buffer | None = None
    place: int = 0


class Cargo(Protocol):
    """What an edge sends, a frame at a time. Called with the edge's lock held."""

    @property
    def seq(self) -> int:
        """The number in the frames' headers."""

    @property
    def fingerprint(self) -> int:
        """What both ends compare, in the frames' headers."""

    def is_finished(self) -> bool:
        """Whether nothing is left to take."""

    def is_ready(self) -> bool:
        """Whether there is something to take."""

    def next_size(self) -> int:
        """The payload size of what comes next, ready or not; 0 where nothing does."""

    def take(self) -> Load | None:
        """What comes next, if it is ready."""


@dataclass(slots=True)
class Frame:
    """A frame that may have to be sent again."""

    number: int
    cargo: Cargo
    load: Load
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
    if connected.family == socket.AF_UNIX or _is_loopback(connected.getpeername()[0]):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


def _await_bytes(connected: socket.socket, seconds: float) -> None:
    """Wait until there is something to be read, or the connection has ended."""
    try:
        readable = select.poll()
        readable.register(connected, select.POLLIN)
        readable.poll(seconds * 1000)
    except (OSError, ValueError) as error:
        log.debug("the connection is gone: %s", error)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


class OutEdge:
    """Everything that this node sends to one other node of a group."""

    def __init__(self, destination: int, epoch: int, name: str) -> None:
        self.destination = destination
        self.counters = EdgeCounters()
        self._epoch = epoch
        self._lock = RLock()
        self._ready = Condition(self._lock)
        self._cargoes: deque[Cargo] = deque()
        self._unacked: deque[Frame] = deque()
        self._resend: deque[Frame] = deque()
        self._partial: tuple[Frame, int] | None = None
        self._next_number = 0
        self._socket: socket.socket | None = None
        self._lost_at = monotonic()  # one that was never opened may be opened yet
        self._crosses_a_wire = True
        self._ack_rest = b""
        self._dropped: list[socket.socket] = []
        self._busy = False
        self._closed = False
        self._thread = Thread(target=self._run, name=f"allfold-send-{name}", daemon=True)
        self._thread.start()

    # What the group calls

    def enqueue(self, cargo: Cargo) -> None:
        """Append what is to be sent; ops are appended in their order."""
        with self._lock:
            self._cargoes.append(cargo)

    def kick(self) -> None:
        """Something may have become ready: send it, here if that is quick."""
        with self._lock:
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
                connected, left = self._socket, deadline - monotonic()
                if connected is None:
                    left = min(left, self._lost_at + RECONNECT_SECONDS - monotonic())
                if left <= 0:
                    return
                if connected is None:
                    self._ready.wait(timeout=left)
            if connected is not None:
                _await_bytes(connected, min(0.2, left))

    def close(self) -> None:
        """End, whatever is still queued."""
        with self._lock:
            self._closed = True
            self._drop_socket()
            self._ready.notify_all()
        self._thread.join(timeout=2.0)
        with self._lock:
            for frame in self._unacked:
                if self._file_of(frame) is not None:
                    # The receiver may yet read it, so it must not be used again. It goes when the
                    # kernel needs it no more.
                    frame.load.buffer = None
            self._release_acknowledged(self._next_number)

    # Connection

    def _take(self, connected: socket.socket, from_frame: int) -> None:
        tune(connected)
        with self._lock:
            if self._closed:
                connected.close()
                return
            self._drop_socket()
            self._ack_rest = b""
            self._release_acknowledged(from_frame)
            self._resend = deque(self._unacked)
            self._partial = None
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
            self._dropped.append(self._socket)
            self._socket = None
            self._lost_at = monotonic()
            if not self._busy:
                self._close_dropped()

    def _close_dropped(self) -> None:
        """Close sockets on which nobody writes any more: their numbers are soon used again."""
        while self._dropped:
            self._dropped.pop().close()

    def _lost(self, connected: socket.socket, error: OSError) -> None:
        with self._lock:
            if self._socket is connected:
                log.info("edge to node %d broke, waiting for it: %s", self.destination, error)
                self._drop_socket()

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
                connected = self._socket
            self._send_all(connected)

    def _has_work(self) -> bool:
        unfinished = self._partial is not None or bool(self._resend)
        return self._socket is not None and (unfinished or self._head_ready())

    def _head_ready(self) -> bool:
        self._skip_finished()
        return bool(self._cargoes) and self._cargoes[0].is_ready()

    def _skip_finished(self) -> None:
        while self._cargoes and self._cargoes[0].is_finished():
            self._cargoes.popleft()

    def _send_small(self, connected: socket.socket) -> None:
        """Send what is ready while it is small and the socket takes it; leave the rest.

        The rest of a frame too: whoever calls this may be the thread that must receive before the
        other node can go on receiving.
        """
        while True:
            with self._lock:
                frame = None
                if len(self._unacked) >= _MANY_UNACKED:
                    self._drain_acks()
                idle = self._partial is None and not self._resend
                if connected is self._socket and idle and self._head_is_small():
                    frame = self._next_frame()
                if frame is None:
                    self._busy = False
                    self._close_dropped()
                    if self._has_work():
                        self._ready.notify_all()
                    return
            self._fill(frame)
            sent = self._write_some(connected, frame)
            if sent < len(frame.header) + len(frame.payload):
                with self._lock:
                    if connected is self._socket:
                        self._partial = frame, sent
                self._rest()
                return
            self._sent(frame)

    def _write_some(self, connected: socket.socket, frame: Frame) -> int:
        """Write what the socket takes at once; the number of bytes."""
        try:
            return connected.sendmsg([frame.header, frame.payload], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._lost(connected, error)
            return 0

    def _write(self, connected: socket.socket, frame: Frame, sent: int) -> bool:
        """Write the rest of a frame; where the connection breaks it is kept for a new one."""
        header, payload = memoryview(frame.header), memoryview(frame.payload)
        total = len(header) + len(payload)
        file = self._file_of(frame)
        try:
            while sent < len(header):
                first = payload[:PIECE_BYTES] if file is None else b""
                sent += connected.sendmsg([header[sent:], first])
            while sent < total:
                done = sent - len(header)
                if file is None:
                    sent += connected.send(payload[done : done + PIECE_BYTES])
                else:
                    place = frame.load.place + done
                    sent += os.sendfile(connected.fileno(), file, place, total - sent)
        except OSError as error:
            self._lost(connected, error)
            return False
        return True

    def _file_of(self, frame: Frame) -> int | None:
        """The file from which the payload can be sent without a copy.

        Between two processes of one machine that is much faster. What is sent stays as it is until
        it has been received: the buffer is held, and nothing overwrites the range before the
        receiver's answer to it.
        """
        buffer = frame.load.buffer
        return None if self._crosses_a_wire or buffer is None else buffer.file

    def _send_all(self, connected: socket.socket | None) -> None:
        """Send until nothing is ready or the connection breaks."""
        while connected is not None:
            with self._lock:
                if connected is not self._socket:
                    break
                self._drain_acks()
                frame, sent = self._unfinished()
            if frame is None:
                break
            self._fill(frame)
            if not self._write(connected, frame, sent):
                break
            self._sent(frame)
        self._rest()

    def _unfinished(self) -> tuple[Frame | None, int]:
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

    def _head_is_small(self) -> bool:
        self._skip_finished()
        return bool(self._cargoes) and self._cargoes[0].next_size() <= INLINE_BYTES

    def _next_frame(self) -> Frame | None:
        self._skip_finished()
        if not self._cargoes:
            return None
        load = self._cargoes[0].take()
        if load is None:
            return None
        frame = Frame(self._next_number, self._cargoes[0], load)
        self._unacked.append(frame)
        self._next_number += 1
        return frame

    def _fill(self, frame: Frame) -> None:
        """Give a frame its bytes; outside the lock, because the digest takes its time."""
        if frame.header:
            return
        load = frame.load
        frame.payload = load.payload()
        if load.buffer is not None and isinstance(frame.payload, bytes):
            load.buffer.release()
            load.buffer = None
        frame.header = FrameHeader(
            type=load.type,
            epoch=self._epoch,
            number=frame.number,
            seq=frame.cargo.seq,
            offset=load.offset,
            length=len(frame.payload),
            fingerprint=frame.cargo.fingerprint,
            digest=xxhash.xxh3_64_intdigest(frame.payload) if self._crosses_a_wire else 0,
        ).pack()

    def _sent(self, frame: Frame) -> None:
        if frame.counted:
            return
        frame.counted = True
        self.counters.payload_bytes += len(frame.payload)
        self.counters.frames += 1
        frame.load.sent()

    # Acknowledgements

    def _unsent_or_unacked(self) -> bool:
        self._drain_acks()
        self._skip_finished()
        return bool(self._cargoes) or bool(self._unacked)

    def _drain_acks(self) -> None:
        """Read what the receiver has acknowledged so far, without waiting."""
        while self._socket is not None and self._unacked:
            try:
                data = self._socket.recv(_ACKS_AT_ONCE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("no acknowledgements from node %d: %s", self.destination, error)
                data = b""
            if not data:
                self._drop_socket()
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
            if frame.load.buffer is not None:
                frame.load.buffer.release()
        self._resend = deque(frame for frame in self._resend if frame.number >= expected)
