"""The tally of a group's ops on this node: how many, how long they took, how they failed."""

from __future__ import annotations

from collections import Counter

from allfold_agent.groups.flight_recorder import OpRecord
from allfold_core.metrics import Histogram

LONG, SHORT = "long", "short"
# From an op among ranks of one node to one that waits for a rank that has lost its way.
SECONDS_BOUNDS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0,
)  # fmt: skip

OpKey = tuple[str, str, str, str]
"""Kind, strategy, dtype and lane of ops that are counted together."""


class Tally:
    """Counts records as they are made: all of the long lane, those of the short one that are seen.

    Changed with the table's lock held; what is counted may be read without it.

    Attributes:
        seconds: of ops that have succeeded.
        skews: by lane, the seconds between their first and last local call.
        errors: the number of ops that have failed, by the code of the error.
    """

    def __init__(self) -> None:
        self.seconds: dict[OpKey, Histogram] = {}
        self.skews = {lane: Histogram(SECONDS_BOUNDS) for lane in (LONG, SHORT)}
        self.errors: Counter[str] = Counter()
        self._first: int | None = None
        self._called = 0

    def note(self, record: OpRecord, lane: str) -> None:
        """Count an op that is over."""
        if record.error:
            self.errors[record.error] += 1
            return
        called = record.fingerprint
        if called is None:  # no rank of this node has a part in it
            return
        key = called.kind.label, record.strategy, called.dtype.label, lane
        seconds = self.seconds.get(key)
        if seconds is None:
            seconds = self.seconds[key] = Histogram(SECONDS_BOUNDS)
        seconds.note(record.seconds)
        self.skews[lane].note(max(record.arrivals.values()))

    def called(self, first: int, last: int) -> int:
        """Return how many ops ranks of this node have called; the number never falls.

        Args:
            first: the first op in which they have a part.
            last: the last one that any of them has called.
        """
        if self._first is None:
            self._first = first
        self._called = max(self._called, last + 1 - self._first)
        return self._called
