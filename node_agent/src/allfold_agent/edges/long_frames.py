"""The part of an in-edge's own thread: frames of any length, while they come without a pause."""

from __future__ import annotations

from threading import Event
from typing import Any

import torch

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.incoming import ACK_BYTES, DamagedPayload, IncomingFrames
from allfold_agent.edges.receivers import Receiver, Sink
from allfold_agent.edges.short_frames import SHORT_SHARED_BYTES
from allfold_core.protocol.frames import HEADER_SIZE, RANGE_SIZE, FrameHeader, FrameType

_LOOK_SECONDS = 0.1
# How long the thread waits for more before it leaves the edge to the reactor again.
_QUIET_MILLISECONDS = 2
_SCRAP_BYTES = 256 * 1024


class LongFrames:
    """Receives frames in the edge's own thread, which may wait for their bytes and for their sinks.

    Args:
        frames: what has arrived on the edge so far.
        receiver: knows the sinks of frames.
        closed: set when the edge is wanted no more.
    """

    def __init__(self, frames: IncomingFrames, receiver: Receiver, closed: Event) -> None:
        self._source = frames.source
        self._frames = frames
        self._receiver = receiver
        self._closed = closed
        self._header = memoryview(bytearray(HEADER_SIZE))
        self._range = memoryview(bytearray(RANGE_SIZE))
        self._scrap = memoryview(b"")

    def receive(self, connection: InConnection) -> None:
        """Receive frames of any length, until nothing comes for a while, or what takes no time.

        Raises:
            EOFError, OSError: the connection or the edge has ended.
            DamagedPayload: a payload is not the one whose digest its header has.
        """
        while not self._closed.is_set():
            connection.fill(self._header)
            if self._receive_frame(connection, FrameHeader.unpack(self._header)):
                return
            if not connection.early and not connection.readable.poll(_QUIET_MILLISECONDS):
                return

    def _receive_frame(self, connection: InConnection, header: FrameHeader) -> bool:
        """Receive a frame; return True for one like those that the reactor reads as they lie."""
        frames = self._frames
        frames.check(header)
        shared = None
        if header.type is FrameType.SHARED:
            connection.fill(self._range)
            header, shared = connection.shared(header, self._range)
        sink = self._await_sink(connection, header)
        delivered = sink is not None and self._deliver(connection, sink, header, shared)
        if not delivered and shared is None:
            self._discard(connection, header.length)
        frames.count_in(header.length, scrapped=not delivered)
        if frames.unacked_bytes >= ACK_BYTES or sink is None or sink.all_received():
            frames.acknowledge(connection)
        return shared is not None and header.length <= SHORT_SHARED_BYTES

    def _await_sink(self, connection: InConnection, header: FrameHeader) -> Sink[Any] | None:
        """Return the sink of a frame, once the local ranks have called its op.

        The peer may die meanwhile.
        """
        while True:
            try:
                return self._receiver.sink_for(self._source, header, _LOOK_SECONDS)
            except TimeoutError:
                if connection.peer_hung_up():
                    raise EOFError("the peer closed the connection") from None

    def _await_room(self, sink: Sink[Any]) -> None:
        """Wait until a frame may be received where it goes, which the op's deadline bounds.

        What has arrived of an op is wanted, also of a peer that has left since.
        """
        while not sink.await_ready(_LOOK_SECONDS):
            if self._closed.is_set():
                raise EOFError("the edge was closed")

    def _deliver(
        self,
        connection: InConnection,
        sink: Sink[Any],
        header: FrameHeader,
        shared: torch.Tensor | None,
    ) -> bool:
        """Receive the payload, if it is not here already; false where it must be thrown away."""
        self._await_room(sink)
        landing = self._frames.admit(sink, header, shared)
        if landing is None:
            return False
        try:
            if shared is None:
                rate, is_wire = self._frames.rate, connection.crosses_a_wire
                rate.begin(len(landing.view), crosses_a_wire=is_wire)
                connection.fill(landing.view)
                rate.end()
            self._frames.verify(header, landing.view)
        except (OSError, EOFError, DamagedPayload):
            sink.retract(landing)
            raise
        sink.received(landing)
        return True

    def _discard(self, connection: InConnection, length: int) -> None:
        if length and not self._scrap:
            self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        while length:
            part = self._scrap[: min(length, _SCRAP_BYTES)]
            connection.fill(part)
            length -= len(part)
