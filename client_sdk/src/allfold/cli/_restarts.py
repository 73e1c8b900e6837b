"""Starting ranks again that have failed: pure decisions, with the time as an argument."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SOON_SECONDS = 5.0
"""A rank that fails within so long of its start has most likely done nothing."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


@dataclass
class Restarts:
    """The restarts of a run's ranks, and those that are still to come.

    Attributes:
        most: how many there may be, of all ranks together.
        used: how many there were, or are to come.
    """

    most: int
    used: int = 0
    _started: dict[int, float] = field(default_factory=dict)
    _counts: Counter[int] = field(default_factory=Counter)
    _failed_soon: Counter[int] = field(default_factory=Counter)
    _failures: dict[int, int] = field(default_factory=dict)
    _planned: dict[int, tuple[float, int]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """True while a rank is to be started again."""
        return bool(self._planned)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that tell a rank of its restarts: ours and torchrun's."""
        count = str(self._counts[rank])
        return {
            "ALLFOLD_RESTARTS": count,
            "TORCHELASTIC_RESTART_COUNT": count,
            "TORCHELASTIC_MAX_RESTARTS": str(self.most),
        }

    def count(self, rank: int) -> int:
        """Return how often a rank was started again."""
        return self._counts[rank]

    def last_failure(self, rank: int) -> int | None:
        """Return the status for which a rank was started again last; ``None`` if it never was."""
        return self._failures.get(rank)

    def started(self, rank: int, now: float) -> None:
        """Note the start of a rank."""
        self._started[rank] = now

    def plan(self, rank: int, status: int, now: float) -> float | None:
        """Have a rank that has failed started again.

        Returns:
            The seconds until then; ``None`` if there were as many restarts as there may be.
        """
        if self.used >= self.most:
            return None
        self.used += 1
        self._counts[rank] += 1
        self._failures[rank] = status
        pause = self._pause(rank, now - self._started[rank])
        self._planned[rank] = (now + pause, status)
        return pause

    def _pause(self, rank: int, lived: float) -> float:
        if lived >= SOON_SECONDS:
            self._failed_soon[rank] = 0
            return 0.0
        self._failed_soon[rank] += 1
        return min(_FIRST_PAUSE * 2.0 ** (self._failed_soon[rank] - 1), _LONGEST_PAUSE)

    def take_due(self, now: float) -> list[tuple[int, int]]:
        """Return the ranks whose time has come, each once, with the status of their failure."""
        due = [(rank, status) for rank, (at, status) in self._planned.items() if at <= now]
        for rank, _ in due:
            del self._planned[rank]
        return due

    def next_at(self) -> float | None:
        """Return the time of the next restart; ``None`` if there is none to come."""
        return min((at for at, _ in self._planned.values()), default=None)

    def cancel(self) -> None:
        """Start nobody again: the run ends."""
        self._planned.clear()
