"""The connections of edges: their options and counters, the receiving and the sending end."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from allfold_agent.edges.outgoing import OutgoingFrame, SentFiles, rights
from allfold_agent.edges.received_files import ReceivedFiles
from allfold_agent.runtime.reactor import HUNG_UP, READABLE, WRITABLE, Reactor
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.protocol.frames import (
    ACK,
    HEADER_SIZE,
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
)

log = logging.getLogger(__name__)

LOOPBACK_BUFFER = 512 * 1024
# How long the receiver tries to open an edge again that has broken.
RECONNECT_SECONDS = 1.0


@dataclass
class EdgeCounters:
    """Payload traffic of one direction, without headers and without frames sent again.

    Attributes:
        scrapped_frames: frames that have come, beside the others, but that nobody wanted any more.
    """

    payload_bytes: int = 0
    frames: int = 0
    scrapped_frames: int = 0


def tune(connected: socket.socket) -> None:
    """Set the socket buffers where the kernel's choice is bad.

    Between machines the kernel adapts them to the link. On loopback there is no link to fill, and
    what is queued beyond the caches is fetched from memory again: half a MiB was fastest.
    """
    # Not by the address of the peer: a connection that it has reset already has none.
    if connected.family == socket.AF_UNIX or _is_loopback(connected.getsockname()[0]):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


# How much of a payload has to be there before somebody is woken for it: each time costs as much as
# receiving this.
_LOW_WATER = 128 * 1024
# Where the kernel tells how much it lets the peer send: rcv_ssthresh in tcp_info, tcp(7).
_WINDOW = struct.Struct("=64xI")


class InConnection:
    """The receiving end of one connection; one thread receives on it.

    Args:
        connected: an open connection to the peer.

    Attributes:
        socket: the connection.
        last_heard: when the last byte came from the peer (monotonic).
        crosses_a_wire: True unless the two ends know that they are on one machine.
        files: that have come from a sender on this machine.
    """

    def __init__(self, connected: socket.socket) -> None:
        tune(connected)
        self.socket = connected
        self.last_heard = monotonic()  # it has answered, or asked, to open the edge
        self.crosses_a_wire = crosses_a_wire(connected)
        self._is_tcp = connected.family != socket.AF_UNIX  # a tunnel's end is not
        self.files = ReceivedFiles()
        self._low_water = 1
        self._window = 0

    def receive_into(self, view: memoryview) -> int:
        """Receive what is there.

        Returns:
            The number of bytes; 0 where there were none.

        Raises:
            EOFError: the peer has closed the connection.
        """
        try:
            if self.crosses_a_wire:
                count = self.socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            else:
                count = self.files.receive_into(self.socket, view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError("the peer closed the connection")
        self.last_heard = monotonic()
        return count

    def acknowledge(self, expected: int) -> bool:
        """Tell the sender which frame is the next; false where there is no room for that."""
        try:
            self.socket.send(ACK.pack(expected), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def shared(
        self, header: FrameHeader, place: memoryview | bytearray
    ) -> tuple[FrameHeader, memoryview]:
        """Return the ``DATA`` frame that a ``SHARED`` one stands for, and its payload.

        Raises:
            FrameError: there is no such memory.
        """
        if self.crosses_a_wire:
            raise FrameError(f"frame {header.number} has its payload on another machine")
        return self.files.content(header, place)

    def wake_for(self, missing: int) -> None:
        """Make the connection readable when a good part of a payload is there.

        But it waits for no more than half of what the peer may send before we read, which is little
        at first; otherwise the peer would wait for us, and we for the peer.
        """
        if missing > HEADER_SIZE and self._is_tcp:
            if self._window < 2 * _LOW_WATER:  # it grows
                info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size)
                (self._window,) = _WINDOW.unpack(info)
            missing = max(1, min(missing, _LOW_WATER, self._window // 2))
        self.wake_at(missing)

    def wake_at(self, nbytes: int) -> None:
        """Make the connection readable only when so many bytes are there, or it has ended.

        A link delivers a long payload packet by packet. A blocking call would not work, because
        bytes that it has taken while it waits no longer count. A tunnel delivers more at once.
        """
        if nbytes != self._low_water and self._is_tcp:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def close(self) -> None:
        """End the connection, and forget the files that came on it."""
        self.socket.close()
        self.files.close()


# A Unix socket takes a longer piece several times more slowly.
_PIECE_BYTES = 256 * 1024
_ACKS_AT_ONCE = ACK.size * 512


class OutConnection:
    """The sending end of one connection; one thread at a time writes on it. Nothing waits.

    Args:
        connected: an open connection to the receiver.
        from_frame: the first frame that the receiver has not got.
        reactor: watches it.
        serve: called in the reactor's thread with itself, and events: when it has ended, when the
            receiver's word is there or what :meth:`listen` is for, or, after :meth:`await_room`,
            once when there is room.

    Attributes:
        socket: the connection.
        last_heard: when the last acknowledgement was read (monotonic).
        crosses_a_wire: True unless the two ends know that they are on one machine.
        takes_files: True once the receiver has said that it takes what comes with a frame, by an
            acknowledgement of nothing new.
        awaits_word: True until it is known whether it does.
        waits: True while it awaits room, or that word. For its user, who holds a lock.
    """

    def __init__(
        self,
        connected: socket.socket,
        from_frame: int,
        reactor: Reactor,
        serve: Callable[[OutConnection, int], None],
    ) -> None:
        tune(connected)
        self.socket = connected
        self.last_heard = monotonic()  # the peer has dialled
        self.crosses_a_wire = crosses_a_wire(connected)
        self.takes_files = False
        self.awaits_word = not self.crosses_a_wire
        self._from_frame = from_frame
        self._files = SentFiles()
        self._ack_rest = b""
        self._reactor = reactor
        self._serve = serve
        self._is_served = False
        self._polled = 0
        self._awaits_room = self._listens = False
        self.waits = self.awaits_word
        reactor.call(self._register)

    # In the reactor's thread, in the order of the calls

    def _register(self) -> None:
        self._polled = HUNG_UP
        self._reactor.register(self.socket, self._served, HUNG_UP)
        self._is_served = True
        self._poll()

    def _poll(self) -> None:
        """Wait for what is awaited. Each acknowledgement by itself is not worth being woken."""
        events = HUNG_UP
        if self.awaits_word or self._listens:
            events |= READABLE
        if self._awaits_room:
            events |= WRITABLE
        if self._is_served and events != self._polled:
            self._reactor.modify(self.socket, events)
            self._polled = events

    def _served(self, events: int) -> None:
        if events & WRITABLE:
            self._awaits_room = False
        self._serve(self, events)
        self._poll()

    def ignore(self) -> None:
        """Serve it no more: it tells of its end again and again."""
        if self._is_served:
            self._is_served = False
            self._reactor.unregister(self.socket)

    def _close(self) -> None:
        if self._reactor.running:
            self.ignore()
        self.socket.close()

    # From any thread

    def await_room(self) -> None:
        """Have the connection served when it takes bytes again."""
        self.waits = self._awaits_room = True
        self._reactor.call(self._poll)

    def listen(self) -> None:
        """Have the connection served for each acknowledgement from now on."""
        self._listens = True
        self._reactor.call(self._poll)

    def shut_down(self) -> None:
        """End the connection; ``OSError`` if it has ended."""
        self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, soon; nobody writes on it any more."""
        if self._reactor.running:
            self._reactor.call(self._close)
        else:
            self._close()

    def shares(self, frame: OutgoingFrame) -> bool:
        """Return True if the place of a payload is written instead of the payload."""
        return self.takes_files and frame.content.is_shared

    def write(self, frame: OutgoingFrame, sent: int, most: int) -> int:
        """Write what the socket takes of a frame, from a byte on, but not much over a bound.

        Returns:
            The bytes of the frame that are written, all in all.

        Raises:
            OSError: the connection broke or was dropped.
        """
        try:
            if not sent and self.shares(frame):
                return self._share(frame)
            header, payload = memoryview(frame.header), memoryview(frame.payload)
            total, stop = len(header) + len(payload), sent + most
            while sent < min(total, stop):
                done = sent - len(header)
                if done < 0:
                    pieces = [header[sent:], payload[:_PIECE_BYTES]]
                    sent += self.socket.sendmsg(pieces, [], socket.MSG_DONTWAIT)
                else:
                    piece = payload[done : done + _PIECE_BYTES]
                    sent += self.socket.send(piece, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        return sent

    def _share(self, frame: OutgoingFrame) -> int:
        """Say where the payload lies, instead of writing it; the number of bytes that saves.

        So few bytes go in one piece. The file goes with them the first time.
        """
        content, head = frame.content, frame.head
        assert content.buffer is not None and head is not None
        place, file = self._files.range_of(content.buffer, content.place, head.length)
        header = head._replace(type=FrameType.SHARED, length=RANGE_SIZE).pack()
        self.socket.sendmsg([header, place.pack()], rights(file), socket.MSG_DONTWAIT)
        if file >= 0:
            self._files.add(content.buffer)
        return len(frame.header) + len(frame.payload)

    def read_ack(self) -> int | None:
        """Read what the receiver has acknowledged, without waiting.

        Returns:
            The number of the frame that it expects next, ``None`` where it is not complete yet.

        Raises:
            BlockingIOError: there is nothing to be read.
            OSError: the connection has ended.
        """
        data = self.socket.recv(_ACKS_AT_ONCE, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        self.last_heard = monotonic()
        data = self._ack_rest + data
        whole = len(data) - len(data) % ACK.size
        self._ack_rest = data[whole:]
        if not whole:
            return None
        if self.awaits_word:
            self.awaits_word = False
            self.takes_files = ACK.unpack_from(data)[0] == self._from_frame
        expected: int = ACK.unpack_from(data, whole - ACK.size)[0]
        return expected
