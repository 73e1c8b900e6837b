"""One connection of an out-edge: frames out, acknowledgements in."""

from __future__ import annotations

import socket
import struct
from time import monotonic

from allfold_agent.edges.connection import tune
from allfold_agent.edges.outgoing import Frame, SentFiles
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.wire.frames import ACK, RANGE_SIZE, FrameType, SharedRange

# A Unix socket takes a longer piece several times more slowly.
PIECE_BYTES = 256 * 1024
_DESCRIPTOR = struct.Struct("i")
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

    def write_some(self, frame: Frame) -> int:
        """Write what the socket takes at once; the number of bytes."""
        try:
            if self.takes_files and frame.content.is_shared:
                return self._share(frame, socket.MSG_DONTWAIT)
            return self.socket.sendmsg([frame.header, frame.payload], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def write_rest(self, frame: Frame, sent: int) -> None:
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

    def _share(self, frame: Frame, flags: int = 0) -> int:
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
            files.note(content.buffer)
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
