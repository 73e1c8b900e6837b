"""The sending end of a connection of the short lane: whole frames, in their order."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice

import xxhash

from allfold_agent.edges.connections import EdgeCounters, tune
from allfold_agent.edges.outgoing import SentFiles, SharedMemory, rights
from allfold_agent.runtime.lane_thread import READABLE, WRITABLE, LaneThread
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.protocol.frames import ACK, HEADER_SIZE, FrameHeader, FrameType

# What is shorter is sent itself, to a node on this machine as well.
_SHARED_BYTES = 32 * 1024
_MOST_PIECES_AT_ONCE = 64

Payload = memoryview | bytearray
FilePlace = tuple[SharedMemory, int]
"""A file, and where something begins in it."""
Unsent = tuple[memoryview, int]
"""Bytes, and a descriptor that goes with the first of them; -1 for none."""


class LaneOut:
    """Sends frames on a connection that the other node has opened. In the lane's thread.

    Args:
        on_lost: told when the connection has ended.

    Attributes:
        socket: the connection.
    """

    def __init__(
        self,
        connected: socket.socket,
        thread: LaneThread,
        counters: EdgeCounters,
        on_lost: Callable[[Exception], None],
    ) -> None:
        tune(connected)
        connected.setblocking(False)
        self.socket = connected
        self._thread = thread
        self._crosses_a_wire = crosses_a_wire(connected)
        self._counters = counters
        self._on_lost = on_lost
        self._number = 0
        self._unsent: deque[Unsent] = deque()
        self._files: SentFiles | None = None  # where the other node takes files
        thread.register(connected.fileno(), self._serve)

    def close(self) -> None:
        """End the connection."""
        self._thread.unregister(self.socket.fileno())
        self.socket.close()

    @property
    def has_sent(self) -> bool:
        """True unless something waits for room in the connection."""
        return not self._unsent

    def send(
        self,
        seq: int,
        stamp: int,
        fingerprint: int,
        behind: int,
        start: int,
        payload: Payload,
        place: FilePlace | None = None,
        kind: FrameType = FrameType.DATA,
    ) -> None:
        """Send a frame; what the socket does not take at once follows as soon as it does.

        Its memory is in use until :attr:`has_sent`, or :meth:`let_go`.

        Args:
            place: where a node on this machine may read the payload, until it has the op's result.
        """
        out = self.socket
        nbytes = len(payload)
        self._counters.frames += 1
        self._counters.payload_bytes += nbytes
        digest, descriptor = 0, -1
        files = self._files
        if place is not None and files is not None and _is_shared(place, nbytes):
            kind = FrameType.SHARED
            found, descriptor = files.range_of(*place, nbytes)
            payload = bytearray(found.pack())
            if descriptor >= 0:
                files.add(place[0])
        elif self._crosses_a_wire:
            digest = xxhash.xxh3_64_intdigest(payload)
        number, self._number = self._number, self._number + 1
        header = FrameHeader(
            kind, stamp, number, seq, start, len(payload), fingerprint, digest, behind
        ).pack()
        if self._unsent:
            self._unsent += ((memoryview(header), descriptor), (memoryview(payload), -1))
            return
        try:
            sent = out.sendmsg((header, payload), rights(descriptor))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._on_lost(error)
            return
        if sent < HEADER_SIZE + len(payload):
            self._unsent += ((memoryview(header), descriptor), (memoryview(payload), -1))
            self._drop_sent(sent)
            self._thread.modify(out.fileno(), READABLE | WRITABLE)

    def let_go(self) -> None:
        """Use no memory any more that others have given: it is theirs again."""
        self._unsent = deque((memoryview(bytes(each)), file) for each, file in self._unsent)

    def _drop_sent(self, count: int) -> None:
        unsent = self._unsent
        while unsent and count >= len(unsent[0][0]):
            count -= len(unsent.popleft()[0])
        if count:
            unsent[0] = unsent[0][0][count:], -1

    def _send_unsent(self, out: socket.socket) -> None:
        """Send what waits, up to the next descriptor, which begins a message of its own."""
        unsent = self._unsent
        descriptor, pieces = unsent[0][1], [unsent[0][0]]
        for piece, file in islice(unsent, 1, _MOST_PIECES_AT_ONCE):
            if file >= 0:
                break
            pieces.append(piece)
        self._drop_sent(out.sendmsg(pieces, rights(descriptor)))

    def _serve(self, events: int) -> None:
        out = self.socket
        try:
            if events & WRITABLE and self._unsent:
                self._send_unsent(out)
                if not self._unsent:
                    self._thread.modify(out.fileno(), READABLE)
            if events & ~WRITABLE:
                self._hear(out)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._on_lost(error)

    def _hear(self, out: socket.socket) -> None:
        said = out.recv(ACK.size)
        if not said:
            raise EOFError("the peer has closed the connection")
        if said == ACK.pack(0) and not self._crosses_a_wire:
            self._files = SentFiles()


def _is_shared(place: FilePlace, nbytes: int) -> bool:
    """Return True if a payload is long enough to be read in its file, and there is one."""
    return nbytes >= _SHARED_BYTES and place[0].file is not None
