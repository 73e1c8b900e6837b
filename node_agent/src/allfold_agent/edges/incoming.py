"""Incoming frames of an edge: their order, their admission, their digests and acknowledgements."""

from __future__ import annotations

import logging
import socket

import torch
import xxhash

from allfold_agent.edges.connection import EdgeCounters
from allfold_agent.edges.in_connection import InConnection
from allfold_agent.edges.link_rate import LinkRate
from allfold_agent.http.receivers import LandingT, Receiver, Sink
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.wire.frames import ACK, FrameHeader

log = logging.getLogger(__name__)

ACK_BYTES = 1 << 20
ACK_FRAMES = 64


class DamagedPayload(ValueError):
    """The payload of a frame is not the one whose digest its header has."""


class IncomingFrames:
    """The state of an in-edge that outlives its connections: what has arrived so far.

    Used by the thread that receives at the moment, so without a lock.

    Args:
        source: the name of the peer's node.
        name: of the edge, for messages.
        receiver: told of frames that do not fit.

    Attributes:
        expected: the number of the next frame.
        unacked_bytes: of payloads that have arrived since the last acknowledgement.
        unacked_frames: that have arrived since then.
        rate: at which payloads come.
    """

    def __init__(self, source: str, name: str, receiver: Receiver) -> None:
        self.source = source
        self.name = name
        self.counters = EdgeCounters()
        self.rate = LinkRate()
        self.expected = 0
        self.unacked_bytes = 0
        self.unacked_frames = 0
        self._receiver = receiver

    def opened(self) -> None:
        """A connection was opened from :attr:`expected` on: that acknowledges all before.

        One more acknowledgement of the same would say that it takes files.
        """
        self.unacked_bytes = self.unacked_frames = 0

    def check(self, header: FrameHeader) -> None:
        """Raise :class:`PeerSentIncoherentTensor` where it is not the next frame of the edge."""
        if header.number != self.expected:
            raise PeerSentIncoherentTensor(
                f"edge {self.name}: frame {header.number}, expected frame {self.expected}"
            )

    def admit(
        self, sink: Sink[LandingT], header: FrameHeader, shared: torch.Tensor | None
    ) -> LandingT | None:
        """Return the landing of a payload, ``None`` where it is not wanted or does not fit.

        Args:
            shared: the payload, where it lies in memory of the sender.
        """
        try:
            landing = sink.admit(header, shared)
        except PeerSentIncoherentTensor as error:
            refusal = PeerSentIncoherentTensor(f"edge {self.name}: {error.message}")
            self._receiver.incoherent(header, refusal)
            return None
        if shared is not None and landing is not None and len(landing.view):
            torch.frombuffer(landing.view, dtype=torch.uint8).copy_(shared)
        return landing

    def verify(self, header: FrameHeader, payload: memoryview) -> None:
        """Compare a payload with its digest and count it; :class:`DamagedPayload` if they differ.

        Nothing is compared where the header has no digest.
        """
        if header.digest and xxhash.xxh3_64_intdigest(payload) != header.digest:
            raise DamagedPayload(f"the payload of frame {header.number} is damaged")
        self.counters.payload_bytes += header.length
        self.counters.frames += 1

    def count_in(self, nbytes: int, *, scrapped: bool) -> None:
        """Note that the expected frame was delivered, or thrown away because nobody wants it."""
        if scrapped:
            self.counters.scrapped_frames += 1
        self.expected += 1
        self.unacked_bytes += nbytes
        self.unacked_frames += 1

    def acknowledge(self, connection: InConnection) -> None:
        """Tell the sender what has arrived, so that it can let go of the memory."""
        self.unacked_bytes = self.unacked_frames = 0
        try:
            connection.socket.send(ACK.pack(self.expected), socket.MSG_DONTWAIT)
        except BlockingIOError:
            log.debug("edge %s: no room for an acknowledgement; a later one covers it", self.name)
