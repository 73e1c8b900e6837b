"""What takes in the frames of an edge, and a frame that is on its way there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from allfold_core.errors import AllfoldError
from allfold_core.frames import FrameHeader


class Spot(Protocol):
    """Where the payload of one frame goes."""

    @property
    def view(self) -> memoryview:
        """Exactly as many bytes as the payload has."""

    def release(self) -> None:
        """Let go of the memory; what landed there is worthless."""


SpotT = TypeVar("SpotT", bound=Spot)


class Sink(Protocol[SpotT]):
    """What takes frames in: an op, or the mail of a group."""

    def is_ready(self, source: int, /) -> bool:
        """Whether the next frame of a node can be admitted at once."""

    def admit(self, source: int, header: FrameHeader, /) -> SpotT | None:
        """Where the payload goes, ``None`` where it is not wanted any more; waits until it may go
        there.

        Raises:
            PeerSentIncoherentTensor: it is not a frame that can come now.
        """

    def retract(self, source: int, landing: SpotT, /) -> None:
        """An admitted frame broke off; it will come again. Lets go of the memory."""

    def received(self, landing: SpotT, /) -> None:
        """The payload is there. Lets go of the memory."""

    def all_received(self, source: int, /) -> bool:
        """Whether nothing more of it will come from a node."""


class Receiver(Protocol):
    """What an in-edge needs of its group."""

    def sink_for(self, source: int, header: FrameHeader, seconds: float, /) -> Sink[Any] | None:
        """Who takes a frame, ``None`` where nobody does; ``TimeoutError`` if nobody does yet."""

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """The edge is gone for good."""

    def incoherent(self, seq: int, error: AllfoldError, /) -> None:
        """A frame does not fit its op."""


@dataclass(slots=True)
class Arriving:
    """A frame whose payload is being received. Without a landing it is thrown away."""

    header: FrameHeader
    sink: Sink[Any] | None
    landing: Spot | None
    received: int = 0

    @property
    def missing(self) -> int:
        """Bytes."""
        return self.header.length - self.received

    def put(self, begun: memoryview) -> None:
        """The beginning of the payload, which came with the header."""
        if self.landing is not None and begun:
            self.landing.view[: len(begun)] = begun
        self.received = len(begun)

    def retract(self, source: int) -> None:
        """The rest does not come on this connection."""
        if self.sink is not None and self.landing is not None:
            self.sink.retract(source, self.landing)
