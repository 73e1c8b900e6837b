"""One connection of an out-edge: frames out, acknowledgements in."""

from __future__ import annotations

import os
import socket
from time import monotonic

from allfold_agent.edges.connection import tune
from allfold_agent.edges.outgoing import Frame
from allfold_core.wire.frames import ACK

# A Unix socket takes a longer piece several times more slowly.
PIECE_BYTES = 256 * 1024
_ACKS_AT_ONCE = ACK.size * 512


class OutConnection:
    """The sending end of one connection; only one thread at a time writes on it.

    Attributes:
        socket: the connection.
        last_heard: when the last acknowledgement was read (monotonic).
    """

    def __init__(self, connected: socket.socket) -> None:
        tune(connected)
        self.socket = connected
        self.last_heard = monotonic()  # the peer has dialled
        self._ack_rest = b""

    def write_some(self, frame: Frame) -> int:
        """Write what the socket takes at once; the number of bytes."""
        try:
            return self.socket.sendmsg([frame.header, frame.payload], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def write_rest(self, frame: Frame, sent: int, file: int | None) -> None:
        """Write what is left of a frame after so many bytes; waits until the peer takes it.

        How long it may take is a matter of the op's deadline; :meth:`shut_down` ends the wait.

        Args:
            file: where the payload is sent from without a copy; ``None`` sends it from memory.

        Raises:
            OSError: the connection broke or was dropped.
        """
        connected = self.socket
        header, payload = memoryview(frame.header), memoryview(frame.payload)
        total = len(header) + len(payload)
        while sent < total:
            done = sent - len(header)
            if done < 0:
                first = payload[:PIECE_BYTES] if file is None else b""
                sent += connected.sendmsg([header[sent:], first])
            elif file is None:
                sent += connected.send(payload[done : done + PIECE_BYTES])
            else:
                place = frame.content.place + done
                sent += os.sendfile(connected.fileno(), file, place, total - sent)

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
        expected: int = ACK.unpack_from(data, whole - ACK.size)[0]
        return expected

    def shut_down(self) -> None:
        """End the connection and wake a thread that writes on it; ``OSError`` if it has ended."""
        self.socket.shutdown(socket.SHUT_RDWR)
