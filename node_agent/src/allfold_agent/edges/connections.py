"""The connections of edges and of the short lane: options and counters, and the receiving end."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from time import monotonic

from allfold_agent.edges.received_files import ReceivedFiles
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.protocol.frames import ACK, HEADER_SIZE, FrameError, FrameHeader

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

    def add(self, nbytes: int) -> None:
        """Count a frame."""
        self.payload_bytes += nbytes
        self.frames += 1


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

    def shared(self, header: FrameHeader, place: memoryview) -> tuple[FrameHeader, memoryview]:
        """Return the ``DATA`` frame that a ``SHARED`` one stands for, and its payload.

        Raises:
            FrameError: there is no such memory.
        """
        if self.crosses_a_wire:
            raise FrameError(f"frame {header.number} has its payload on another machine")
        return self.files.content(header, place)

    def wake_for(self, missing: int) -> None:
        """Make the connection readable when a header or much of a payload is there.

        A link delivers a long payload packet by packet. A blocking call would not work, because
        bytes that it has taken while it waits no longer count. A tunnel delivers more at once.

        But it waits for no more than half of what the peer may send before we read, which is little
        at first; otherwise the peer would wait for us, and we for the peer.
        """
        if not self._is_tcp:
            return
        if missing > HEADER_SIZE:
            if self._window < 2 * _LOW_WATER:  # it grows
                info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW.size)
                (self._window,) = _WINDOW.unpack(info)
            missing = max(1, min(missing, _LOW_WATER, self._window // 2))
        if missing != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)
            self._low_water = missing

    def close(self) -> None:
        """End the connection, and forget the files that came on it."""
        self.socket.close()
        self.files.close()
