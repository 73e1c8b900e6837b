"""One connection of an in-edge: its bytes, and how many of them wake the receiver."""

from __future__ import annotations

import select
import socket
import struct
from threading import Event
from time import monotonic

import torch

from allfold_agent.edges.connection import tune
from allfold_agent.edges.received_files import ReceivedFiles
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.wire.frames import (
    HEADER_SIZE,
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
)

_AT_ONCE = socket.MSG_DONTWAIT
# How much of a payload has to be there before somebody is woken for it: each time costs as much as
# receiving this.
_LOW_WATER = 128 * 1024
# Where the kernel tells how much it lets the peer send: rcv_ssthresh in tcp_info, tcp(7).
_WINDOW = struct.Struct("=64xI")
# After so long the thread of a long payload takes what there is.
_PATIENCE_MILLISECONDS = 100
_RIGHTS_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_DESCRIPTOR = struct.Struct("i")


class InConnection:
    """The receiving end of one connection; only one thread at a time receives on it.

    Args:
        connected: an open connection to the peer.
        early: what was received with its opening.
        closed: set when the edge is wanted no more; ends :meth:`fill`.

    Attributes:
        socket: the connection.
        readable: polls it for something to be read.
        early: bytes of frames that were received, but are not read yet.
        last_heard: when the last byte came from the peer (monotonic).
        crosses_a_wire: True unless the two ends know that they are on one machine.
        files: that have come from a sender on this machine.
    """

    def __init__(self, connected: socket.socket, early: bytes, closed: Event) -> None:
        tune(connected)
        self.socket = connected
        self.early = memoryview(early)
        self.last_heard = monotonic()  # it has answered, or asked, to open the edge
        self.readable = select.poll()
        self.readable.register(connected, select.POLLIN)
        self._closed = closed
        self.crosses_a_wire = crosses_a_wire(connected)
        self._is_tcp = connected.family != socket.AF_UNIX  # a tunnel's end is not
        self.files = ReceivedFiles()
        self._low_water = 1
        self._window = 0

    def receive_into(self, view: memoryview, flags: int = _AT_ONCE) -> int:
        """Receive what is there; without flags, wait until something is.

        Returns:
            The number of bytes; 0 where there were none.

        Raises:
            EOFError: the peer has closed the connection.
        """
        try:
            if self.crosses_a_wire:
                count = self.socket.recv_into(view, 0, flags)
            else:
                count = self._receive_with_files(view, flags)
        except BlockingIOError:
            return 0
        if count == 0:
            raise EOFError("the peer closed the connection")
        self.last_heard = monotonic()
        return count

    def _receive_with_files(self, view: memoryview, flags: int) -> int:
        count, rights, _, _ = self.socket.recvmsg_into(
            [view], _RIGHTS_BYTES, flags | socket.MSG_CMSG_CLOEXEC
        )
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

    def fill(self, view: memoryview) -> None:
        """Receive exactly ``len(view)`` bytes; waits for them.

        Raises:
            EOFError: the connection or the edge was closed.
        """
        if self.early and view:
            count = min(len(view), len(self.early))
            view[:count] = self.early[:count]
            self.early = self.early[count:]
            view = view[count:]
        crosses_a_wire = self.crosses_a_wire
        while view:
            if self._closed.is_set():
                raise EOFError("the edge was closed")
            if crosses_a_wire:
                self.wake_for(len(view))
                self.readable.poll(_PATIENCE_MILLISECONDS)
            view = view[self.receive_into(view, _AT_ONCE if crosses_a_wire else 0) :]
        self.wake_at(HEADER_SIZE)

    def wake_for(self, missing: int) -> None:
        """Have the connection readable when a good part of a payload is there.

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
        """Have the connection readable only when so many bytes are there, or it has ended.

        A link delivers a long payload packet by packet. A blocking call would not work, because
        bytes that it has taken while it waits no longer count. A tunnel delivers more at once.
        """
        if nbytes != self._low_water and self._is_tcp:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def peer_hung_up(self) -> bool:
        """Return True if the peer has ended the connection; bytes may be left to be read."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))
