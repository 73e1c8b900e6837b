"""Incoming frames of an edge: their order, admission, digests, acknowledgements, and their rate."""

from __future__ import annotations

import logging
import socket
import statistics
from collections import deque
from time import monotonic

import torch
import xxhash

from allfold_agent.edges.connections import EdgeCounters, InConnection
from allfold_agent.edges.receivers import LandingT, Receiver, Sink
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.protocol.frames import ACK, FrameHeader

# What comes of shorter ones comes at once.
_LEAST_BYTES = 32 * 1024
# A sample is the rate of so many bytes, or of what came in so many seconds of waiting.
_SAMPLE_BYTES = 4 << 20
_SAMPLE_SECONDS = 0.5
# One slow sample, or two, may be those of a busy machine.
_SAMPLES_KEPT = 5
_SAMPLES_NEEDED = 3
# A link that was not used for so long is measured anew: it may have healed.
_SAMPLE_KEPT_SECONDS = 300.0


class LinkRate:
    """Measures the direction from one node to this one, by the time from header to last byte.

    When the header is sent, the sender has the whole payload and the receiver has called its op, so
    the time contains no wait for either of them. If the receiver was late, much of the payload has
    arrived already, and the link seems faster than it is. If the receiver is delayed after the
    header, the link seems slower. So the median of some samples counts.

    Attributes:
        samples: how many there were so far, for others to know whether there is a new one.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._bytes = 0
        self._seconds = 0.0
        self._rates: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_KEPT)  # when, and what
        self._began: float | None = None
        self._missing = 0

    def begin(self, missing: int, *, crosses_a_wire: bool) -> None:
        """Start timing a payload, of which ``missing`` bytes are still to be received."""
        is_telling = missing >= _LEAST_BYTES and crosses_a_wire
        self._began, self._missing = monotonic() if is_telling else None, missing

    def end(self) -> None:
        """Stop timing: the payload has been received completely."""
        if self._began is not None:
            self.add_sample(self._missing, monotonic() - self._began)

    def add_sample(self, nbytes: int, seconds: float) -> None:
        """Note that so many bytes took so long."""
        self._bytes += nbytes
        self._seconds += seconds
        if self._bytes >= _SAMPLE_BYTES or self._seconds >= _SAMPLE_SECONDS:
            now = monotonic()
            while self._rates and now > self._rates[0][0] + _SAMPLE_KEPT_SECONDS:
                self._rates.popleft()
            self._rates.append((now, self._bytes / max(self._seconds, 1e-9)))
            self._bytes, self._seconds = 0, 0.0
            self.samples += 1

    @property
    def bytes_per_second(self) -> float | None:
        """The median of the latest samples; ``None`` while there are too few."""
        rates = [rate for _, rate in list(self._rates)]
        return statistics.median(rates) if len(rates) >= _SAMPLES_NEEDED else None


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
