"""The tally of a group's ops on this node: how many, how long they took, how they failed."""

from __future__ import annotations

from collections import Counter

from allfold_agent.groups.flight_recorder import OpRecord, State
from allfold_agent.runtime.locks import make_lock
from allfold_service.metrics import Histogram

LONG, SHORT = "long", "short"
# From an op among ranks of one node to one that waits for a rank that has lost its way.
SECONDS_BOUNDS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0,
)  # fmt: skip

OpKey = tuple[str, str, str, str]
"""Kind, strategy, dtype and lane of ops that are counted together."""


class ErrorCounts:
    """The number of ops that have failed on this node, in all groups, also those that are over."""

    def __init__(self) -> None:
        self._lock = make_lock("errors")
        self._counts: Counter[str] = Counter()

    def note(self, code: str) -> None:
        """Count an op that has failed with an error of this code."""
        with self._lock:
            self._counts[code] += 1

    def by_code(self) -> Counter[str]:
        """Return the numbers by the code of the error."""
        with self._lock:
            return self._counts.copy()


class Tally:
    """Counts records as they are made: all of the long lane, those of the short one that are seen.

    Changed with the table's lock held; what is counted may be read without it.

    Args:
        errors: of all groups of the node.

    Attributes:
        seconds: of ops that have succeeded.
        skews: by lane, the seconds between their first and last local call.
    """

    def __init__(self, errors: ErrorCounts) -> None:
        self.seconds: dict[OpKey, Histogram] = {}
        self.skews = {lane: Histogram(SECONDS_BOUNDS) for lane in (LONG, SHORT)}
        self._errors = errors
        self._first: int | None = None
        self._called = 0

    def note(self, record: OpRecord, lane: str) -> None:
        """Count an op that is over."""
        if record.error:
            self._errors.note(record.error)
            return
        called = record.fingerprint
        if called is None or record.state is State.DROPPED:  # no rank here has a part in it
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
