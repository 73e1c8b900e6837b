"""Slow and lossy links, from what the kernel counts of the connections over them.

The sender's kernel knows best: which part of the time it had data that the network did not take,
how fast they were acknowledged then, and what it had to send again. A delivery rate that was not
limited by the application is what the path carries (Cardwell et al., BBR, ACM Queue 2016, section
"Delivery rate"; Linux ``tcp_rate.c``); other ones are a lower bound of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allfold_core.incident import Cause

_WINDOW_SECONDS = 0.5
_WINDOWS = 2
# A link whose rate falls to less than this part of the usual one is slow.
_SLOW_PART = 0.3
# Faster links are bounded by the machine rather than by the network: it takes a greater change.
_FAST = 125e6
_SLOW_PART_OF_FAST = 1 / 10
_LEAST_BUSY = 0.3
_IDLE_WINDOWS = 10
_LOSS = 0.01
_LEAST_LOST = 3
_REMEMBERED = 4
# Losses of a queue that overflows come with a round trip that is much longer than without one.
_QUEUED_RATIO = 3.0
# How fast the usual rate follows what is measured: a single burst says little, and a link that
# stays slow for some minutes is another link.
_FOLLOWS = 0.2
_FOLLOWS_WHEN_SLOW = 0.002
_QUEUED_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class LinkSample:
    """The kernel's counters of one connection.

    Attributes:
        at: when (monotonic).
        busy: seconds for which there was something to be sent.
        hindered: those of them for which the receiver, or the sender's own buffer, had no room.
        segments: sent so far, with data.
        lost: of them, those that were sent again.
        rate: bytes per second that were acknowledged of late.
        is_bound: True if the application limited that rate.
        round_trip: in seconds, of late.
        shortest: the shortest round trip that there was.
    """

    at: float
    busy: float
    hindered: float
    segments: int
    lost: int
    rate: float
    is_bound: bool
    round_trip: float
    shortest: float


@dataclass(frozen=True, slots=True)
class LinkTrouble:
    """A problem of a link: its cause, and a phrase to follow the link's name."""

    cause: Cause
    phrase: str
    evidence: dict[str, float]


class ConnectionWatch:
    """Watches one direction of one connection between two nodes."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._first: LinkSample | None = None  # of the present window
        self._slow = 0
        self._lossy = 0
        self._idle = 0
        self._trouble: LinkTrouble | None = None

    def judge(self, sample: LinkSample) -> LinkTrouble | None:
        """Take another sample, a fraction of a second after the last; return what is wrong.

        A link that is not used stays as it was for some seconds.
        """
        first = self._first
        if first is None:
            self._first = sample
        elif sample.at - first.at >= _WINDOW_SECONDS:
            self._first = sample
            self._trouble = self._judge(first, sample)
        return self._trouble

    def _judge(self, first: LinkSample, last: LinkSample) -> LinkTrouble | None:
        window = last.at - first.at
        own = last.busy - first.busy - (last.hindered - first.hindered)
        segments, lost = last.segments - first.segments, last.lost - first.lost
        part = _SLOW_PART if self._usual < _FAST else _SLOW_PART_OF_FAST
        is_below = last.rate < part * self._usual
        if segments:
            self._learn(last, _FOLLOWS_WHEN_SLOW if is_below else _FOLLOWS)
        if own < _LEAST_BUSY * window and lost < _LEAST_LOST:
            self._idle += 1
            return self._trouble if self._idle <= _IDLE_WINDOWS else None
        self._idle = 0
        is_lossy = lost >= max(_LEAST_LOST, _LOSS * segments) and not _is_queued(last)
        is_slow = own >= _LEAST_BUSY * window and not last.is_bound and is_below
        # Between losses a connection recovers, slowly: that is no other trouble. And a rate may be
        # that of a burst, in this window or another.
        self._lossy = _counted(self._lossy, is_lossy)
        self._slow = _counted(self._slow, is_slow and not self._lossy)
        if is_lossy and self._lossy >= _WINDOWS:
            return _losses(lost, segments, window)
        if is_slow and self._slow >= _WINDOWS:
            return self._slowness(last)
        lasts = self._slow >= _WINDOWS or self._lossy
        return self._trouble if lasts else None

    def _slowness(self, sample: LinkSample) -> LinkTrouble:
        return LinkTrouble(
            Cause.SLOW_LINK,
            f"carries {_rate(sample.rate)}, and usually {_rate(self._usual)}",
            {"rate": sample.rate, "usual": self._usual, "round_trip": sample.round_trip},
        )

    def _learn(self, sample: LinkSample, follows: float) -> None:
        """Note a rate; one that the application has limited is a lower bound."""
        if not self._usual:
            self._usual = sample.rate
        elif not sample.is_bound or sample.rate > self._usual:
            self._usual += follows * (sample.rate - self._usual)


def _counted(windows: int, is_bad: bool) -> int:
    """Return how many more windows of late were bad than good."""
    return min(windows + 1, _REMEMBERED) if is_bad else max(windows - 1, 0)


def _is_queued(sample: LinkSample) -> bool:
    """Return True if packets wait in a queue, which is what loses them then."""
    return sample.round_trip >= max(_QUEUED_RATIO * sample.shortest, _QUEUED_SECONDS)


def _losses(lost: int, segments: int, window: float) -> LinkTrouble:
    return LinkTrouble(
        Cause.LOSSY_LINK,
        f"loses packets: {lost} of {segments} segments of the last {window:.1f} s had to be sent "
        "again",
        {"lost": lost, "segments": segments},
    )


def _rate(value: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B/s"


def worst(found: Iterable[LinkTrouble | None]) -> LinkTrouble | None:
    """Return the trouble of one link out of those of its connections: losses before slowness."""
    troubles = [each for each in found if each is not None]
    return min(troubles, key=lambda each: each.cause is not Cause.LOSSY_LINK, default=None)
