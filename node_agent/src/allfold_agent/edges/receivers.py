"""Who receives the frames of edges: the owner of an edge, and the sinks that it knows."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from allfold_core.errors import AllfoldError
from allfold_core.protocol.frames import FrameHeader


class FrameLanding(Protocol):
    """Memory for the payload of one frame."""

    @property
    def view(self) -> memoryview:
        """Exactly as many bytes as the payload has; none if it is read where it lies."""

    def release(self) -> None:
        """Release the memory; what landed there is worthless."""


LandingT = TypeVar("LandingT", bound=FrameLanding)


class Sink(Protocol[LandingT]):
    """A consumer of the frames of one node: an op, or the messages of a group."""

    def is_ready(self) -> bool:
        """Return True if the next frame can be admitted. Its edge is resumed when that changes."""

    def admit(self, header: FrameHeader, shared: memoryview | None, /) -> LandingT | None:
        """Return the landing of a frame, ``None`` where it is not wanted. Not before it is ready.

        Args:
            shared: the payload, where it lies in memory of the sender: it stays as it is until
                :meth:`received` returns.

        Raises:
            PeerSentIncoherentTensor: it is not a frame that can come now.
        """

    def retract(self, landing: LandingT, /) -> None:
        """An admitted frame broke off; it will come again. Lets go of the memory."""

    def received(self, landing: LandingT, /) -> None:
        """Take in a payload that has been received completely, and release its memory."""


class NotYet(Exception):
    """The op of a frame has not begun here. Its edge is resumed when that may have changed."""


class Receiver(Protocol):
    """The owner of an in-edge: its group. It knows a source by the name of its node."""

    def sink_for(self, source: str, header: FrameHeader, /) -> Sink[Any] | None:
        """Return the sink of a frame, or ``None`` where nobody wants it any more.

        Raises:
            NotYet: nobody wants it yet.
        """

    def edge_lost(self, source: str, error: AllfoldError) -> None:
        """Act on the permanent loss of an edge."""

    def incoherent(self, header: FrameHeader, error: AllfoldError, /) -> None:
        """Fail the op of a frame that does not fit it."""
