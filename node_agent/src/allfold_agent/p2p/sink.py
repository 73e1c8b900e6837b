"""Receiving the frames of point-to-point messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from allfold_agent.p2p.messages import MessageLanding, MessageTransfer
from allfold_agent.runtime.buffers import BufferPool
from allfold_agent.runtime.locks import make_lock
from allfold_core.errors import AllfoldError, PeerSentIncoherentTensor
from allfold_core.protocol.frames import FrameHeader, FrameType

_LONGEST_NOTE = 128 * 1024


class MessageReceiver:
    """The sink of the edge of one node that carries messages. No frame waits here for anything."""

    def __init__(self, source: str, messages: IncomingMessages) -> None:
        self._source = source
        self._messages = messages

    def is_ready(self) -> bool:
        """No frame ever waits."""
        return True

    def admit(self, header: FrameHeader, _shared: memoryview | None) -> MessageLanding | None:
        """Return memory for a frame, ``None`` where it is not wanted any more."""
        return self._messages.admit(self._source, header)

    def retract(self, landing: MessageLanding) -> None:
        """The frame broke off."""
        landing.release()

    def received(self, landing: MessageLanding) -> None:
        """Read a frame that has landed.

        Raises:
            PeerSentIncoherentTensor: there is no meaning in it.
        """
        header = landing.header
        try:
            self._messages.read(self._source, header, landing.view)
        except ValueError as error:
            what = f"message {header.seq}: a {header.type.name} that cannot be read: {error}"
            raise PeerSentIncoherentTensor(what) from error
        finally:
            landing.release()


class IncomingMessages(ABC):
    """The receiver of all edges that carry messages.

    Args:
        buffers: where frames land.
        edge_lost: called when nothing more can be received from a node.
    """

    def __init__(self, buffers: BufferPool, edge_lost: Callable[[str, AllfoldError], None]) -> None:
        self._buffers = buffers
        self._edge_lost = edge_lost
        self._lock = make_lock("p2p")
        self._receivers: dict[str, MessageReceiver] = {}
        self._transfers: dict[tuple[str, int], MessageTransfer] = {}

    @abstractmethod
    def read(self, source: str, header: FrameHeader, view: memoryview) -> None:
        """Do what a frame says."""

    def sink_for(self, source: str, _header: FrameHeader) -> MessageReceiver:
        """All frames of one edge have one sink."""
        receiver = self._receivers.get(source)
        if receiver is None:
            receiver = self._receivers[source] = MessageReceiver(source, self)
        return receiver

    def edge_lost(self, source: str, error: AllfoldError) -> None:
        """An in-edge is gone for good."""
        self._edge_lost(source, error)

    def incoherent(self, _header: FrameHeader, error: AllfoldError) -> None:
        """A frame does not fit: its edge cannot be trusted any more."""
        raise error

    def admit(self, source: str, header: FrameHeader) -> MessageLanding | None:
        """Return memory for a frame, ``None`` where it is not wanted any more.

        Raises:
            PeerSentIncoherentTensor: there is no such message.
        """
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
        return MessageLanding(header, buffer.view[: header.length], buffer)
