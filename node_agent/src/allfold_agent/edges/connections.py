"""The connections of edges: their options and counters, the receiving and the sending end."""

from __future__ import annotations

import logging
import select
import socket
import struct
from dataclasses import dataclass
from time import monotonic

import torch

from allfold_agent.edges.outgoing import OutgoingFrame, SentFiles
from allfold_agent.edges.received_files import ReceivedFiles
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.protocol.frames import (
    ACK,
    HEADER_SIZE,
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
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


def await_bytes(connected: socket.socket, seconds: float) -> None:
    """Wait until there is something to be read, or the connection has ended."""
    try:
        readable = select.poll()
        readable.register(connected, select.POLLIN)
        readable.poll(seconds * 1000)
    except (OSError, ValueError) as error:
        log.debug("the connection is gone: %s", error)


_WITH_FILES = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
# How much of a payload has to be there before somebody is woken for it: each time costs as much as
# receiving this.
_LOW_WATER = 128 * 1024
# Where the kernel tells how much it lets the peer send: rcv_ssthresh in tcp_info, tcp(7).
_WINDOW = struct.Struct("=64xI")
_RIGHTS_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_DESCRIPTOR = struct.Struct("i")


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
                count = self._receive_with_files(view)
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError("the peer closed the connection")
        self.last_heard = monotonic()
        return count

    def _receive_with_files(self, view: memoryview) -> int:
        count, rights, _, _ = self.socket.recvmsg_into([view], _RIGHTS_BYTES, _WITH_FILES)
        for _, _, data in rights:
            self.files.add([each for (each,) in _DESCRIPTOR.iter_unpack(data)])
        return count

    def shared(self, header: FrameHeader, place: memoryview) -> tuple[FrameHeader, torch.Tensor]:
        """Return the ``DATA`` frame that a ``SHARED`` one stands for, and its payload.

        Raises:
            FrameError: there is no such memory.
        """
        if header.length != RANGE_SIZE or self.crosses_a_wire:
            raise FrameError(f"frame {header.number} cannot have its payload in shared memory")
        found = SharedRange.unpack(place)
        memory = self.files.memory(header.number, found)
        return header._replace(type=FrameType.DATA, length=found.nbytes), memory

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
PIECE_BYTES = 256 * 1024
_ACKS_AT_ONCE = ACK.size * 512


class OutConnection:
    """The sending end of one connection; only one thread at a time writes on it.

    Args:
        connected: an open connection to the receiver.
        from_frame: the first frame that the receiver has not got.

    Attributes:
        socket: the connection.
        last_heard: when the last acknowledgement was read (monotonic).
        crosses_a_wire: True unless the two ends know that they are on one machine.
        takes_files: True once the receiver has said that it takes what comes with a frame, by an
            acknowledgement of nothing new.
        awaits_word: True until it is known whether it does.
    """

    def __init__(self, connected: socket.socket, from_frame: int) -> None:
        tune(connected)
        self.socket = connected
        self.last_heard = monotonic()  # the peer has dialled
        self.crosses_a_wire = crosses_a_wire(connected)
        self.takes_files = False
        self.awaits_word = not self.crosses_a_wire
        self._from_frame = from_frame
        self._files = SentFiles()
        self._ack_rest = b""

    def write_some(self, frame: OutgoingFrame) -> int:
        """Write what the socket takes at once; the number of bytes."""
        try:
            if self.takes_files and frame.content.is_shared:
                return self._share(frame, socket.MSG_DONTWAIT)
            return self.socket.sendmsg([frame.header, frame.payload], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def write_rest(self, frame: OutgoingFrame, sent: int) -> None:
        """Write what is left of a frame after so many bytes; waits until the peer takes it.

        How long it may take is a matter of the op's deadline; :meth:`shut_down` ends the wait.

        Raises:
            OSError: the connection broke or was dropped.
        """
        connected = self.socket
        header, payload = memoryview(frame.header), memoryview(frame.payload)
        total = len(header) + len(payload)
        if not sent and self.takes_files and frame.content.is_shared:
            sent = self._share(frame)
        while sent < total:
            done = sent - len(header)
            if done < 0:
                sent += connected.sendmsg([header[sent:], payload[:PIECE_BYTES]])
            else:
                sent += connected.send(payload[done : done + PIECE_BYTES])

    def _share(self, frame: OutgoingFrame, flags: int = 0) -> int:
        """Say where the payload lies, instead of writing it; the number of bytes that saves.

        So few bytes go in one piece. The file goes with them the first time.
        """
        content, head = frame.content, frame.head
        assert content.buffer is not None and content.buffer.file is not None and head is not None
        slot, files = self._files.slot_of(content.buffer), self._files
        is_new = slot is None
        place = SharedRange(
            files.next_slot if slot is None else slot, is_new, content.place, head.length
        )
        header = head._replace(type=FrameType.SHARED, length=RANGE_SIZE).pack()
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(content.buffer.file)
        self.socket.sendmsg([header, place.pack()], [rights] if is_new else [], flags)
        if is_new:
            files.add(content.buffer)
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

    def shut_down(self) -> None:
        """End the connection and wake a thread that writes on it; ``OSError`` if it has ended."""
        self.socket.shutdown(socket.SHUT_RDWR)
