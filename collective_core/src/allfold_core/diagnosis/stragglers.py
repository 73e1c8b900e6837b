"""Ranks that hold the others up, and what else hinders a group at the time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from allfold_core.incident import LOST_SECONDS, Incident


class Hindrances:
    """The open incidents of one group, as its verdicts quote them. From any thread."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Incident, float]] = {}  # by id, and when it was heard

    def take_in(self, incident: Incident, now: float) -> None:
        """Note an incident, or that it is over.

        Args:
            now: monotonic.
        """
        if incident.is_open:
            self._open[incident.id] = incident, now
        else:
            self._open.pop(incident.id, None)

    def forget_lost(self, now: float) -> None:
        """Forget incidents that were not repeated for long: their reporter is gone."""
        for number, (_, heard) in list(self._open.items()):
            if now - heard > LOST_SECONDS:
                self._open.pop(number, None)

    def clear(self) -> None:
        """Forget all."""
        self._open.clear()

    def of_ranks(self) -> dict[int, str]:
        """Return what hinders each rank: a phrase such as "its process is stopped"."""
        return {
            incident.culprit.rank: f"its process {process}"
            for incident in self._incidents()
            if incident.culprit.rank is not None and (process := incident.evidence.get("process"))
        }

    def of_links(self) -> list[str]:
        """Return a sentence on each link that is slow or loses packets."""
        return [each.sentence for each in self._incidents() if each.culprit.kind == "link"]

    def _incidents(self) -> list[Incident]:
        return [incident for incident, _ in list(self._open.values())]


# The others lose this share of their time by a slow rank, at least.
_LEAST_SHARE = 0.25
_LEAST_RATIO = 2.0
_LEAST_EXCESS = 0.002
_STARVED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class OwnTime:
    """The own time of one rank in a window of time.

    Attributes:
        ops: how many calls were measured.
        seconds: all together.
        window: the seconds in which they were.
        starved: the share of the window for which its process was ready, but had no CPU.
    """

    ops: int
    seconds: float
    window: float
    starved: float = 0.0

    @property
    def mean(self) -> float:
        """The seconds between two ops."""
        return self.seconds / self.ops if self.ops else 0.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for in every op.

    Attributes:
        own: the seconds that it needs between two ops.
        others: the median of what the others need.
        share: the part of their time that they wait for it.
        is_starved: True if its machine has no CPU for it.
    """

    rank: int
    own: float
    others: float
    share: float
    is_starved: bool

    @property
    def phrase(self) -> str:
        """A phrase to follow the rank's name."""
        lead = (
            "gets too little of its machine's CPUs, and needs"
            if self.is_starved
            else "is slow: it needs"
        )
        return (
            f"{lead} {_seconds(self.own)} between two ops where the others need "
            f"{_seconds(self.others)}, so that they wait for it {self.share:.0%} of the time"
        )


def slowest(times: Mapping[int, OwnTime]) -> Straggler | None:
    """Return the rank that keeps the others waiting, ``None`` where nobody stands out."""
    measured = {rank: each for rank, each in times.items() if each.ops and each.window > 0}
    if len(measured) < 2:
        return None
    rank = max(measured, key=lambda each: (measured[each].mean, -each))
    time = measured[rank]
    others = statistics.median(each.mean for other, each in measured.items() if other != rank)
    excess = time.mean - others
    share = min(1.0, excess * time.ops / time.window)
    if share < _LEAST_SHARE or excess < _LEAST_EXCESS or time.mean < _LEAST_RATIO * others:
        return None
    return Straggler(rank, time.mean, others, share, time.starved >= _STARVED_SHARE)


class StragglerWatch:
    """Names a slow rank once it was the slowest in some windows, one after the other.

    Args:
        windows: how many; one alone may be an accident of the machine's scheduler.
        patience: so many windows in a row without it end the naming of a rank.
    """

    def __init__(self, windows: int = 2, patience: int = 6) -> None:
        self._windows = windows
        self._patience = patience
        self._rank = -1
        self._seen = 0
        self._named: Straggler | None = None
        self._missed = 0

    def judge(self, times: Mapping[int, OwnTime]) -> Straggler | None:
        """Take the times of one more window; return the rank that is named now."""
        found = slowest(times)
        rank = -1 if found is None else found.rank
        self._seen = self._seen + 1 if found is not None and rank == self._rank else 1
        self._rank = rank
        if found is not None and self._seen >= self._windows:
            self._named, self._missed = found, 0
        elif self._named is not None:
            self._missed = 0 if rank == self._named.rank else self._missed + 1
            if self._missed >= self._patience:
                self._named = None
        return self._named


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"
