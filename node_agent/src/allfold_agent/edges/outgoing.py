"""Outgoing frames of an edge: the sources of their payloads, and the order of these."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from allfold_agent.runtime.buffers import Buffer
from allfold_core.protocol.frames import FrameHeader, FrameType, SharedRange


class SendQueue:
    """The sources of an edge that are not finished: the urgent ones first, each kind in its order.

    Frames are numbered when they are taken from their source, so what goes ahead here is ahead on
    the wire. The edge's lock protects it.
    """

    def __init__(self) -> None:
        self._urgent: deque[PayloadSource] = deque()
        self._others: deque[PayloadSource] = deque()

    def add(self, source: PayloadSource, *, urgent: bool) -> None:
        """Append a source to those of its kind."""
        (self._urgent if urgent else self._others).append(source)

    def head(self) -> PayloadSource | None:
        """Return the source that is sent next, ready or not; ``None`` without one."""
        for sources in (self._urgent, self._others):
            while sources and sources[0].is_finished():
                sources.popleft()
            if sources:
                return sources[0]
        return None


# A mapping costs the receiver address space, and a new one page faults.
SLOTS = 8


class SharedMemory(Protocol):
    """Memory that agents of this machine can map; see ``Buffer`` and ``SharedFile``."""

    @property
    def serial(self) -> int:
        """No other one ever has it."""

    @property
    def file(self) -> int | None:
        """The descriptor of its file, which lasts as long as this; ``None`` if it is none."""


FilePlace = tuple[SharedMemory, int]
"""A file, and where something begins in it."""


class SentFiles:
    """The buffers whose files were passed on one connection, each in a slot.

    A buffer that is used for op after op keeps its slot. Where there are more buffers than slots,
    a new one takes the slot of the one that was passed first.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._passed = 0

    def pass_range(
        self, buffer: SharedMemory, start: int, nbytes: int
    ) -> tuple[SharedRange, SharedMemory | None]:
        """Return where a payload lies, and what has to go with that, unless the receiver has it."""
        slot = self._slots.get(buffer.serial)
        if slot is not None:
            return SharedRange(slot, False, start, nbytes), None
        if self._passed >= SLOTS:
            del self._slots[next(iter(self._slots))]  # passed first, so it has that slot
        slot = self._slots[buffer.serial] = self._passed % SLOTS
        self._passed += 1
        return SharedRange(slot, True, start, nbytes), buffer


_DESCRIPTOR = struct.Struct("i")


def rights(memory: SharedMemory) -> list[tuple[int, int, bytes]]:
    """Return what ``sendmsg`` passes the file of some memory with."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(memory.file))]


@dataclass(slots=True)
class Payload:
    """The content of one frame.

    Attributes:
        offset: for the frame's header.
        read: called once, outside of all locks, for the bytes.
        sent: called once, when the frame has been written.
        buffer: memory that is held until the frame is acknowledged; ``None`` where the payload
            lasts by itself.
        place: where the payload begins in the buffer's file, in bytes.
        is_shared: a receiver on this machine may read it there: it stays as it is until the frame
            is acknowledged.
    """

    type: FrameType
    offset: int
    read: Callable[[], memoryview | bytes]
    sent: Callable[[], None]
    buffer: Buffer | None = None
    place: int = 0
    is_shared: bool = False


class PayloadSource(Protocol):
    """An op's part of an edge, or a message: payloads in their order.

    Its methods are called with the edge's lock held, the properties by whoever sends a frame.
    """

    @property
    def stamp(self) -> int:
        """The stamp of the op's attempt, for the headers; 0 of a message."""

    @property
    def behind(self) -> int:
        """The distance from the last op that is final on all nodes to this one, for the headers."""

    @property
    def seq(self) -> int:
        """The op's or message's number, for the headers."""

    @property
    def fingerprint(self) -> int:
        """The digest that both ends compare, for the headers."""

    def is_finished(self) -> bool:
        """Return True if nothing is left to take."""

    def is_ready(self) -> bool:
        """Return True if the next payload can be taken."""

    def next_size(self) -> int:
        """Return the bytes of the next payload, ready or not; 0 without one."""

    def next_is_shared(self) -> bool:
        """Return True if a receiver on this machine may read the next payload where it lies."""

    def take(self) -> Payload | None:
        """Return the next payload, ``None`` where it is not ready."""


@dataclass(slots=True)
class OutgoingFrame:
    """A frame that may have to be sent again."""

    number: int
    source: PayloadSource
    content: Payload
    head: FrameHeader | None = None
    payload: memoryview | bytes = b""
    counted: bool = False

    @property
    def place(self) -> FilePlace | None:
        """Where a receiver on this machine may read the payload."""
        content = self.content
        if content.buffer is None or not content.is_shared:
            return None
        return content.buffer, content.place


class SentFrames:
    """The frames of an edge in their order, as long as the receiver has not acknowledged them.

    The edge's lock protects it.

    Attributes:
        unacked: those.
        resend: of these, the ones that have to go out again on a new connection.
        next_number: of the frame that is taken next.
    """

    def __init__(self) -> None:
        self.unacked: deque[OutgoingFrame] = deque()
        self.resend: deque[OutgoingFrame] = deque()
        self.next_number = 0

    @property
    def oldest(self) -> int:
        """The number of the first frame that the receiver is not known to have."""
        return self.unacked[0].number if self.unacked else self.next_number

    def take(self, source: PayloadSource) -> OutgoingFrame | None:
        """Take the next frame of a source; ``None`` where it is not ready."""
        content = source.take()
        if content is None:
            return None
        frame = OutgoingFrame(self.next_number, source, content)
        self.unacked.append(frame)
        self.next_number += 1
        return frame

    def release(self, expected: int) -> None:
        """Let go of the frames before this one, which the receiver has."""
        while self.unacked and self.unacked[0].number < expected:
            frame = self.unacked.popleft()
            if frame.content.buffer is not None:
                frame.content.buffer.release()
        self.resend = deque(frame for frame in self.resend if frame.number >= expected)

    def release_all(self) -> None:
        """Let go of all frames; what a receiver may yet read is not to be used again."""
        for frame in self.unacked:
            if frame.content.is_shared:
                frame.content.buffer = None  # it goes when nobody has it mapped any more
        self.release(self.next_number)
