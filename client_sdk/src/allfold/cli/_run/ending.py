"""The end of a run and the restarts of its ranks: pure decisions, at times that are given."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field

TIMED_OUT = 124
"""The status of a run that was not over in time, as timeout(1) has it."""


@dataclass
class Ending:
    """The cause of a run's end, and the signals that are still to be sent.

    Attributes:
        grace: seconds between one step of the ending and the next, harder one.
        keep_going: a failed rank does not end the others.
        urgent: end at once, because of a signal or the timeout and not of a failed rank.
        someone_ended_well: a rank has ended with status 0.
    """

    grace: float
    keep_going: bool = False
    urgent: bool = False
    someone_ended_well: bool = False
    _status: int | None = None
    _steps: list[tuple[float, signal.Signals]] = field(default_factory=list)
    _told: int = 0
    _lost: int | None = None
    _is_by_failure: bool = False

    @property
    def begun(self) -> bool:
        """True once the ranks are being ended, or have been asked to end."""
        return self._status is not None

    @property
    def exit_status(self) -> int:
        """The status of the launcher once all ranks have ended."""
        if self._status is not None:
            return self._status
        return 0 if self.someone_ended_well else self._lost or 0

    def rank_ended(self, status: int, now: float) -> bool:
        """Note the end of a rank; True when it is a failure that ends the run."""
        if status == 0:
            self.someone_ended_well = True
            return False
        if self.keep_going:
            self._lost = self._lost or status
            return False
        begins = self._begin(status, now + self.grace)
        self._is_by_failure |= begins
        return begins

    def caused_by(self, status: int) -> None:
        """Take the status of the failure that led to the one which was seen first."""
        if self._is_by_failure:
            self._status = status
        self._lost = self._lost and status

    def timed_out(self, now: float) -> bool:
        """Note that the run takes too long; True when this is what ends it."""
        self.urgent = True
        return self._begin(TIMED_OUT, now)

    def in_vain(self, status: int, now: float) -> None:
        """Note that those who are left wait for what cannot come: end them, because of a failure.

        Args:
            status: of that failure.
        """
        self._begin(0 if self.keep_going else status, now)

    def told_to_end(self, number: int, now: float) -> None:
        """Note a signal that we got: the ranks get it too, and the second time they are killed."""
        self._told += 1
        self.urgent = True
        self._status = self._status or 128 + number
        if self._told > 1:
            self._plan(now, signal.SIGKILL)
        elif number == signal.SIGINT:
            self._plan(now, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        else:
            self._plan(now, signal.SIGTERM, signal.SIGKILL)

    def due(self, now: float) -> list[signal.Signals]:
        """The signals whose time has come; each is given out once."""
        due = [number for at, number in self._steps if at <= now]
        self._steps = self._steps[len(due) :]
        return due

    def next_at(self) -> float | None:
        """Return the time of the next signal; ``None`` if none is due."""
        return self._steps[0][0] if self._steps else None

    def _begin(self, status: int, first_step: float) -> bool:
        if self._status is not None:
            return False
        self._status = status
        self._plan(first_step, signal.SIGTERM, signal.SIGKILL)
        return True

    def _plan(self, first: float, *numbers: signal.Signals) -> None:
        """One signal after the other, a grace apart."""
        self._steps = [(first + step * self.grace, number) for step, number in enumerate(numbers)]


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
        """Plan the restart of a rank that has failed.

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
