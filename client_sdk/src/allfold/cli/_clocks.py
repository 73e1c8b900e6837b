"""The clocks of nodes, as seen from here: how far each is from ours, and how sure that is. Pure.

As in NTP: the clock that an answer carries was read between the request and the answer, so half of
the shortest round trip is the most by which the middle may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Offset:
    """The seconds by which a clock is ahead of ours.

    Attributes:
        uncertainty: the most by which ``ahead`` may be wrong.
    """

    ahead: float
    uncertainty: float

    def agrees_with(self, other: Offset) -> bool:
        """Return True if both may be offsets of one clock."""
        return abs(self.ahead - other.ahead) <= self.uncertainty + other.uncertainty


OUR_CLOCK = Offset(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """One request for a clock.

    Attributes:
        sent: when it was sent, on our clock.
        theirs: the clock that was answered.
        received: when the answer was here.
    """

    sent: float
    theirs: float
    received: float


def estimate(readings: Iterable[Reading]) -> Offset:
    """Return the offset of a clock, by the reading of the shortest round trip."""
    best = min(readings, key=lambda each: each.received - each.sent)
    middle = (best.sent + best.received) / 2
    return Offset(best.theirs - middle, (best.received - best.sent) / 2)


def with_shared_clocks(offsets: Sequence[Offset]) -> list[Offset]:
    """Return the offsets with the best estimate for all that may be of one clock.

    The monotonic clocks of two machines count from their starts, so if they agree within a round
    trip they are one clock. Then ops of agents on one machine are not shifted against each other.
    """
    known = [OUR_CLOCK]
    for each in sorted(offsets, key=lambda offset: offset.uncertainty):
        if not any(each.agrees_with(clock) for clock in known):
            known.append(each)
    return [next(clock for clock in known if each.agrees_with(clock)) for each in offsets]
