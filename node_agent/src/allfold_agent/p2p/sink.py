"""Receiving the frames of point-to-point messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from allfold_agent.p2p.messages import MessageLanding, Transfer
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import AllfoldError, PeerSentIncoherentTensor
from allfold_core.wire.frames import FrameHeader, FrameType

_LONGEST_NOTE = 128 * 1024


class MessageSink(ABC):
    """The sink of all edges that carry messages. No frame waits here for anything.

    Args:
        buffers: where frames land.
        edge_lost: called when a node cannot be reached any more.
    """

    def __init__(self, buffers: BufferPool, edge_lost: Callable[[int, AllfoldError], None]) -> None:
        self._buffers = buffers
        self._edge_lost = edge_lost
        self._lock = make_lock("p2p")
        self._transfers: dict[tuple[int, int], Transfer] = {}

    @abstractmethod
    def _read(self, source: int, header: FrameHeader, view: memoryview) -> None:
        """Do what a frame says."""

    def sink_for(self, _source: int, _header: FrameHeader, _seconds: float) -> Self:
        """All frames of these edges are for this object."""
        return self

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """An in-edge is gone for good."""
        self._edge_lost(source, error)

    def incoherent(self, _seq: int, error: AllfoldError) -> None:
        """A frame does not fit: its edge cannot be trusted any more."""
        raise error

    def is_ready(self, _source: int) -> bool:
        """No frame ever waits."""
        return True

    def await_ready(self, _source: int, _seconds: float) -> bool:
        """No frame ever waits."""
        return True

    def admit(self, source: int, header: FrameHeader) -> MessageLanding | None:
        """Return memory for a frame, ``None`` where it is not wanted any more."""
        if header.type is FrameType.PARCEL:
            with self._lock:
                transfer = self._transfers.get((source, header.seq))
            if transfer is None:
                return None  # withdrawn, or its receive has failed
            fits = header.offset + header.length <= transfer.envelope.nbytes
        else:
            fits = header.length <= _LONGEST_NOTE
        if not fits or header.type in (FrameType.DATA, FrameType.SIGNAL):
            raise PeerSentIncoherentTensor(
                f"message {header.seq}: a {header.type.name} of {header.length} bytes at "
                f"{header.offset} cannot be"
            )
        buffer = self._buffers.take(header.length)
        return MessageLanding(source, header, buffer.view[: header.length], buffer)

    def retract(self, _source: int, landing: MessageLanding) -> None:
        """The frame broke off."""
        landing.release()

    def all_received(self, _source: int) -> bool:
        """Every frame is acknowledged at once: its sender may be waiting to leave."""
        return True

    def received(self, landing: MessageLanding) -> None:
        """Read a frame that has landed."""
        try:
            self._read(landing.source, landing.header, landing.view)
        finally:
            landing.release()
