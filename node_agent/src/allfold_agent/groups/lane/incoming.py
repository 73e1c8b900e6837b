"""The receiving end of a connection of the short lane."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

import xxhash

from allfold_agent.edges.connections import EdgeCounters, InConnection
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.edges.received_files import MissingFile
from allfold_agent.groups.lane.outgoing import Payload
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.protocol.frames import HEADER_SIZE, FrameError, FrameHeader, FrameType

LONGEST_PAYLOAD = 512 * 1024
"""Of a frame: short against the caches, long against what it takes to send one."""

# The longest frame that is copied out of the stage; others come to their memory at once.
_STAGE_BYTES = HEADER_SIZE + 64 * 1024
_MOST_IDLE = 32


class FrameSink(Protocol):
    """Takes the frames that come."""

    def destination(self, node: str, header: FrameHeader) -> memoryview | None:
        """Return the memory for the payload of a frame; ``None`` for any other."""

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        """Take in a frame; with ``is_there`` it has come to its :meth:`destination`."""


class Payloads:
    """Memory for long payloads; what was used last is used next, as the caches have it.

    Attributes:
        files_come: False once a frame of a node on this machine came without the file that it is
            in: something between the two passes bytes alone.
    """

    def __init__(self) -> None:
        self._idle: list[bytearray] = []
        self.files_come = True

    def take(self, nbytes: int) -> memoryview:
        """Return memory of a size, until it is given back."""
        memory = self._idle.pop() if self._idle else bytearray(LONGEST_PAYLOAD)
        return memoryview(memory)[:nbytes]

    def clear(self) -> None:
        """Give what is idle back to the system."""
        self._idle.clear()

    def give_back(self, payload: Payload) -> None:
        """Take a payload back, if it is of this memory."""
        memory = payload.obj if isinstance(payload, memoryview) else None
        if not isinstance(memory, bytearray) or len(memory) != LONGEST_PAYLOAD:
            return
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(memory)


class Incoming:
    """A long frame that is on its way.

    Attributes:
        is_there: the payload comes to where the sink wants it.
        got: the bytes that have come.
    """

    __slots__ = ("got", "header", "is_there", "payload")

    def __init__(self, header: FrameHeader, payload: memoryview, *, is_there: bool) -> None:
        self.header = header
        self.payload = payload
        self.is_there = is_there
        self.got = 0


class LaneIn:
    """Receives frames on a connection that this node has opened. In the lane's thread.

    Args:
        node: the other one.
        sink: takes the frames that come.
        payloads: memory for those.
        rate: at which payloads come.
        on_lost: told when the connection has ended.
    """

    def __init__(
        self,
        node: str,
        connected: socket.socket,
        thread: LaneThread,
        sink: FrameSink,
        payloads: Payloads,
        counters: EdgeCounters,
        rate: LinkRate,
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._connection = InConnection(connected)
        self._node = node
        self._rate = rate
        self._thread = thread
        self._sink = sink
        self._payloads = payloads
        self._counters = counters
        self._on_lost = on_lost
        self._stage = bytearray(_STAGE_BYTES)
        self._view = memoryview(self._stage)
        self._filled = 0
        self._long: Incoming | None = None

    def start(self, early: bytes) -> None:
        """Begin, with bytes that came with the answer to the dial."""
        self._filled = len(early)
        self._view[: len(early)] = early
        connection = self._connection
        self._thread.register(connection.socket, self._serve)
        try:
            if self._payloads.files_come and not connection.crosses_a_wire:
                connection.acknowledge(0)  # nothing new: the sender may pass files now
            self._take_frames()
        except (OSError, FrameError) as error:
            self._on_lost(error)

    def close(self) -> None:
        """End the connection."""
        self._thread.unregister(self._connection.socket)
        self._connection.close()

    def let_go(self) -> None:
        """Write to no memory any more that the sink has given."""
        long = self._long
        if long is not None and long.is_there:
            long.payload = self._payloads.take(long.header.length)
            long.is_there = False

    def _serve(self, _events: int) -> None:
        connection = self._connection
        try:
            if self._long is None:
                self._filled += connection.receive_into(self._view[self._filled :])
                self._take_frames()
            # Behind the stage: what is there already of a long frame need not wait for its turn.
            while (long := self._long) is not None:
                count = connection.receive_into(long.payload[long.got :])
                if not count:
                    return
                long.got += count
                self._take_if_whole(long)
        except (OSError, EOFError, FrameError) as error:
            self._on_lost(error)

    def _take_frames(self) -> None:
        """Take the frames that are in the stage; the last may be a long one that goes on."""
        start = 0
        while self._long is None and self._filled - start >= HEADER_SIZE:
            header = FrameHeader.unpack(self._view[start : start + HEADER_SIZE])
            end = start + HEADER_SIZE + header.length
            if end > self._filled:
                if end - start <= _STAGE_BYTES:
                    break
                start = self._begin_long(header, start + HEADER_SIZE)
                continue
            payload = self._stage[start + HEADER_SIZE : end]
            start = end
            self._take(header, payload, is_there=False)
        if start:
            rest = self._filled - start
            self._view[:rest] = self._stage[start : self._filled]
            self._filled = rest

    def _begin_long(self, header: FrameHeader, start: int) -> int:
        """Begin with a frame whose payload begins in the stage; returns where the stage ends."""
        if header.length > LONGEST_PAYLOAD:
            raise FrameError(f"a frame of {header.length} bytes in the short lane")
        wanted = self._sink.destination(self._node, header)
        payload = self._payloads.take(header.length) if wanted is None else wanted
        incoming = Incoming(header, payload, is_there=wanted is not None)
        incoming.got = self._filled - start
        payload[: incoming.got] = self._view[start : self._filled]
        self._long = incoming
        missing = header.length - incoming.got
        self._rate.begin(missing, crosses_a_wire=self._connection.crosses_a_wire)
        return self._filled

    def _take_if_whole(self, incoming: Incoming) -> None:
        if incoming.got == incoming.header.length:
            self._long = None
            self._rate.end()
            self._take(incoming.header, incoming.payload, is_there=incoming.is_there)

    def _take(self, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        if header.type is FrameType.SHARED:
            header, payload = self._shared(header, payload)
        elif header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
            raise FrameError(f"the payload of frame {header.number} is damaged")
        self._counters.frames += 1
        self._counters.payload_bytes += header.length
        self._sink.take(self._node, header, payload, is_there=is_there)

    def _shared(self, header: FrameHeader, payload: Payload) -> tuple[FrameHeader, Payload]:
        """Return the frame that one stands for whose payload lies in memory of the sender."""
        try:
            return self._connection.shared(header, payload)
        except MissingFile:
            self._payloads.files_come = False
            raise
