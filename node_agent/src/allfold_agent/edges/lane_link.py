"""The connections of the short lane to one other node: whole frames, in both directions.

Each node dials the other, as for other edges: what it receives comes on the connection that it has
opened. Nothing is sent again: if a connection breaks, the nodes agree to do the ops in the long
lane.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from time import monotonic

import xxhash

from allfold_agent.edges.connections import EdgeCounters, tune
from allfold_agent.runtime.lane_thread import READABLE, WRITABLE, LaneThread
from allfold_agent.runtime.tunnels import crosses_a_wire
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import HEADER_SIZE, FrameError, FrameHeader, FrameType

log = logging.getLogger(__name__)

_STAGE_BYTES = 1 << 20

OnFrame = Callable[[str, FrameHeader, bytearray], None]
OnChange = Callable[[], None]


class LaneLink:
    """The lane's frames to and from one node. In the lane's thread.

    Args:
        node: the other one.
        thread: the lane's.
        on_frame: told of each frame that has come.
        on_broken: told when a connection has ended.
    """

    def __init__(
        self, node: str, thread: LaneThread, on_frame: OnFrame, on_broken: OnChange
    ) -> None:
        self.node = node
        self.sent, self.received = EdgeCounters(), EdgeCounters()
        self._thread = thread
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._broke_at: dict[str, float] = {}
        self._out: socket.socket | None = None
        self._in: socket.socket | None = None
        self._unsent = b""
        self._stage = bytearray(_STAGE_BYTES)
        self._view = memoryview(self._stage)
        self._filled = 0
        self._number = 0

    @property
    def is_whole(self) -> bool:
        """True if frames can go both ways."""
        return self._out is not None and self._in is not None

    @property
    def sending(self) -> socket.socket | None:
        """The connection on which it sends, if there is one. From any thread."""
        return self._out

    def take_out(self, connected: socket.socket) -> None:
        """Send on this connection, which the other node has opened."""
        self._drop_out()
        self._note_end("to")
        tune(connected)
        connected.setblocking(False)
        self._out, self._number = connected, 0
        self._thread.register(connected.fileno(), self._serve_out)

    def take_in(self, connected: socket.socket, early: bytes) -> None:
        """Receive on this connection, which this node has opened."""
        self._drop_in()
        self._note_end("from")
        tune(connected)
        connected.setblocking(False)
        self._in, self._filled = connected, len(early)
        self._view[: len(early)] = early
        self._thread.register(connected.fileno(), self._serve_in)
        try:
            self._take_frames()
        except FrameError as error:
            self._lose_in(error)

    def close(self) -> None:
        """End the connections."""
        self._drop_out()
        self._drop_in()

    def _note_break(self, direction: str, error: Exception) -> None:
        log.info("the short lane %s node %s broke: %s", direction, self.node, error)
        self._broke_at[direction] = monotonic()

    def _note_end(self, direction: str) -> None:
        """Log that the lane is there again, if it was broken in this direction."""
        began = self._broke_at.pop(direction, None)
        if began is not None:
            seconds = monotonic() - began
            log.info(
                "the short lane %s node %s is back, after %.1f s", direction, self.node, seconds
            )

    # Sending

    def send(
        self, seq: int, stamp: int, fingerprint: int, behind: int, payload: memoryview | bytes
    ) -> None:
        """Send a frame; what the socket does not take at once follows as soon as it does."""
        out = self._out
        if out is None:
            return
        digest = xxhash.xxh3_64_intdigest(payload) if crosses_a_wire(out) else 0
        number, self._number = self._number, self._number + 1
        header = FrameHeader(
            FrameType.DATA, stamp, number, seq, 0, len(payload), fingerprint, digest, behind
        ).pack()
        self.sent.frames += 1
        self.sent.payload_bytes += len(payload)
        if self._unsent:
            self._unsent += header + bytes(payload)
            return
        try:
            sent = out.sendmsg((header, payload))
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose_out(error)
            return
        if sent < HEADER_SIZE + len(payload):
            self._unsent = (header + bytes(payload))[sent:]
            self._thread.modify(out.fileno(), READABLE | WRITABLE)

    def _serve_out(self, events: int) -> None:
        out = self._out
        if out is None:
            return
        try:
            if events & WRITABLE and self._unsent:
                self._unsent = self._unsent[out.send(self._unsent) :]
                if not self._unsent:
                    self._thread.modify(out.fileno(), READABLE)
            if events & ~WRITABLE and not out.recv(1):
                raise EOFError("the peer has closed the connection")
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            self._lose_out(error)

    def _lose_out(self, error: Exception) -> None:
        self._note_break("to", error)
        self._drop_out()
        self._on_broken()

    def _drop_out(self) -> None:
        if self._out is not None:
            self._thread.unregister(self._out.fileno())
            self._out.close()
        self._out, self._unsent = None, b""

    # Receiving

    def _serve_in(self, _events: int) -> None:
        connected = self._in
        if connected is None:
            return
        try:
            count = connected.recv_into(self._view[self._filled :])
            if not count:
                raise EOFError("the peer has closed the connection")
            self._filled += count
            self._take_frames()
        except BlockingIOError:
            return
        except (OSError, EOFError, FrameError) as error:
            self._lose_in(error)

    def _lose_in(self, error: Exception) -> None:
        self._note_break("from", error)
        self._drop_in()
        self._on_broken()

    def _take_frames(self) -> None:
        start = 0
        while self._filled - start >= HEADER_SIZE:
            header = FrameHeader.unpack(self._view[start : start + HEADER_SIZE])
            end = start + HEADER_SIZE + header.length
            if end - start > _STAGE_BYTES:
                raise FrameError(f"a frame of {header.length} bytes in the short lane")
            if end > self._filled:
                break
            payload = self._stage[start + HEADER_SIZE : end]
            if header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
                raise FrameError(f"the payload of frame {header.number} is damaged")
            start = end
            self.received.frames += 1
            self.received.payload_bytes += header.length
            self._on_frame(self.node, header, payload)
        if start:
            rest = self._filled - start
            self._view[:rest] = self._stage[start : self._filled]
            self._filled = rest

    def _drop_in(self) -> None:
        if self._in is not None:
            self._thread.unregister(self._in.fileno())
            self._in.close()
        self._in, self._filled = None, 0


class LaneDoor:
    """The end at which another node opens a connection of the short lane."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def attach(self, from_frame: int) -> Callable[[socket.socket], None]:
        """Accept a connection; returns its taker."""
        if from_frame:
            raise PeerLost("the short lane sends nothing again")
        return self._take
