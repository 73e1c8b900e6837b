"""The rate at which one node sends to another, measured on the payloads that come."""

from __future__ import annotations

import statistics
from collections import deque
from time import monotonic

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
