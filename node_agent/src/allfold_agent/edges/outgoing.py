"""Outgoing frames, and the sources of their payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from allfold_agent.runtime.buffers import Buffer
from allfold_core.wire.frames import FrameHeader, FrameType


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


class Cancellable(Protocol):
    """A payload source that can be taken back while it is queued."""

    def cancel(self) -> bool:
        """Let nothing more of it be taken; return True if nothing was."""


@dataclass(slots=True)
class Frame:
    """A frame that may have to be sent again."""

    number: int
    source: PayloadSource
    content: Payload
    head: FrameHeader | None = None
    header: bytes = b""
    payload: memoryview | bytes = b""
    counted: bool = False
