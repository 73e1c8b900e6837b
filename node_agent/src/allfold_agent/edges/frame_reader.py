"""Frames out of the bytes of a connection: of edges, and of the short lane.

A short frame is taken out of the stage once all of it has come. What is not yet there of a long
payload goes straight to the memory that its taker names.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.link_rate import LinkRate
from allfold_core.protocol.frames import HEADER_SIZE, FrameError, FrameHeader, FrameType

_SHARED = FrameType.SHARED  # to look it up takes longer than to look at a header
NOWHERE = memoryview(bytearray())
"""The memory for a payload that is thrown away."""

# The stage holds so many short frames of the longest kind.
_SHORT_FRAMES = 4
# After so much of a payload it is the turn of other connections.
_TURN_BYTES = 1 << 20


class FrameTaker(Protocol):
    """Takes the frames of a connection, in their order. One that has to wait keeps those behind it.

    It is shown again by :meth:`FrameReader.advance`.
    """

    def take(self, header: FrameHeader, payload: memoryview, /, *, is_shared: bool) -> bool:
        """Take a frame that is whole; return False where it has to wait.

        Args:
            payload: others use its memory after this.
            is_shared: it lies in memory of the sender instead, as long as that needs to be.
        """

    def begin(self, header: FrameHeader, /) -> memoryview | None:
        """Return the memory for a long payload, or :data:`NOWHERE`; ``None`` where it has to wait.

        It has exactly as many bytes as the payload.
        """

    def finish(self, header: FrameHeader, memory: memoryview, /) -> None:
        """Take the frame that was begun: all of its payload has come to that memory."""


class FrameReader:
    """Receives the frames of one connection. Nothing waits; one thread uses it.

    Args:
        taker: takes them.
        rate: measures how fast long payloads come.
        stage_bytes: so much is received at once, unless it is of a long payload.
        early: what was received with the opening of the connection.

    Attributes:
        header: of the long frame whose payload is on its way; ``None`` without one.
        memory: where that goes to. Another one may take its place.
    """

    def __init__(
        self,
        connection: InConnection,
        taker: FrameTaker,
        rate: LinkRate,
        stage_bytes: int,
        early: bytes,
    ) -> None:
        self.header: FrameHeader | None = None
        self.memory = NOWHERE
        self._connection = connection
        self._taker = taker
        self._rate = rate
        self._stage = memoryview(bytearray(max(stage_bytes, len(early))))
        self._stage[: len(early)] = early
        self._filled = len(early)
        self._longest_short = stage_bytes // _SHORT_FRAMES - HEADER_SIZE
        self._needed = HEADER_SIZE  # in the stage, to go on
        self._got = 0  # of the long payload

    @property
    def missing(self) -> int:
        """The number of bytes that have to come before there is anything to do; at least 1."""
        if self.header is not None:
            return self.header.length - self._got
        return max(1, self._needed - self._filled)

    def receive(self) -> None:
        """Receive what is there, up to the end of a long payload or of a turn.

        Raises:
            EOFError: the peer has closed the connection.
            FrameError: what comes is damaged, or no frame.
            OSError: the connection has ended.
        """
        connection, left = self._connection, _TURN_BYTES
        if self.header is None:
            self._filled += connection.receive_into(self._stage[self._filled :])
            self.advance()
        # Behind the stage: what is there already of a long payload need not wait for its turn.
        while (header := self.header) is not None and left > 0:
            # What is thrown away comes to the stage, which is empty.
            room = self.memory[self._got :] or self._stage[: header.length - self._got]
            count = connection.receive_into(room[:left])
            if not count:
                return
            left -= count
            self._got += count
            if self._got == header.length:
                self._finish(header)

    def advance(self) -> None:
        """Take the frames in the stage, and begin with a long one."""
        take, stage, filled, taken = self._taker.take, self._stage, self._filled, 0
        self._needed = HEADER_SIZE
        while filled - taken >= HEADER_SIZE:
            start = taken + HEADER_SIZE
            header = FrameHeader.unpack(stage[taken:start])
            end = start + header.length
            if end <= filled:
                payload, is_shared = stage[start:end], header.type is _SHARED
                if is_shared:
                    header, payload = self._connection.shared(header, payload)
                elif header.digest:
                    _verify(header, payload)
                if not take(header, payload, is_shared=is_shared):
                    break
                taken = end
            elif header.length <= self._longest_short:
                self._needed = end - taken
                break
            else:
                if self._begin(header, stage[start:filled]):
                    taken = filled
                break
        if taken:
            rest = self._filled = filled - taken
            if rest:
                stage[:rest] = stage[taken:filled]

    def _begin(self, header: FrameHeader, begun: memoryview) -> bool:
        """Begin with a long frame; return False where it has to wait."""
        if header.type is _SHARED:
            raise FrameError(f"frame {header.number} names memory with {header.length} bytes")
        memory = self._taker.begin(header)
        if memory is None:
            return False
        if memory:
            memory[: len(begun)] = begun
        self.header, self.memory, self._got = header, memory, len(begun)
        missing = header.length - len(begun)
        self._rate.begin(missing, crosses_a_wire=self._connection.crosses_a_wire)
        return True

    def _finish(self, header: FrameHeader) -> None:
        self._rate.end()
        memory = self.memory
        if header.digest and memory:
            _verify(header, memory)
        self.header, self.memory = None, NOWHERE
        self._taker.finish(header, memory)


def _verify(header: FrameHeader, payload: memoryview) -> None:
    """Raise :class:`FrameError` if a payload is not the one whose digest its header has."""
    if xxhash.xxh3_64_intdigest(payload) != header.digest:
        raise FrameError(f"the payload of frame {header.number} is damaged")
