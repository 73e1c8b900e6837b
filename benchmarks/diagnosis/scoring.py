"""The score of a diagnosis: what was reported for each fault that was injected. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = "nothing"
Report = Mapping[str, Any]
"""An incident in its JSON form."""


@dataclass(frozen=True)
class Expected:
    """The incident that a fault is expected to cause.

    Attributes:
        cause: of the incident.
        communication: whether links or agents are at fault.
        culprits: those of which one is to be named: the JSON forms.
        effects: ``hang``, ``slow`` or ``failed``: those that are right.
    """

    cause: str
    communication: bool
    culprits: Sequence[Mapping[str, Any]]
    effects: Sequence[str]

    def names(self, report: Report) -> bool:
        """Return True if the culprit of an incident is right."""
        return any(dict(report["culprit"]) == dict(each) for each in self.culprits)

    def has_class_of(self, report: Report) -> bool:
        """Return True if the class of an incident is right: communication or not, hang or slow."""
        return report["communication"] == self.communication and report["effect"] in self.effects

    def matches(self, report: Report) -> bool:
        """Return True if culprit and class of an incident are right."""
        return self.names(report) and self.has_class_of(report)


@dataclass(frozen=True)
class Trial:
    """One fault, and what was reported.

    Attributes:
        fault: its kind.
        reports: the incidents that began after it, in the order in which they were found.
        delay: seconds from the fault until the right incident could be read at the orchestrator.
    """

    fault: str
    expected: Expected
    reports: Sequence[Report]
    delay: float | None

    @property
    def is_found(self) -> bool:
        """True if class and culprit were reported at all."""
        return any(self.expected.matches(each) for each in self.reports)

    @property
    def false_reports(self) -> list[Report]:
        """The incidents that blame somebody else, or something else."""
        return [each for each in self.reports if not self.expected.matches(each)]

    @property
    def said(self) -> str:
        """The cause that was reported first; that of a wrong culprit has a mark."""
        if not self.reports:
            return NOTHING
        first = self.reports[0]
        return str(first["cause"]) + ("" if self.expected.names(first) else "?")


@dataclass
class Score:
    """The score of many trials."""

    trials: list[Trial] = field(default_factory=list)

    def within(self, seconds: float) -> float:
        """Return the share of faults whose class and culprit were known in time."""
        found = [t.delay is not None and t.delay <= seconds for t in self.trials]
        return sum(found) / len(found) if found else 0.0

    @property
    def recall(self) -> float:
        """The share of faults whose class and culprit were reported."""
        return sum(t.is_found for t in self.trials) / len(self.trials) if self.trials else 0.0

    @property
    def precision(self) -> float:
        """The share of reports that were right."""
        right = sum(len(t.reports) - len(t.false_reports) for t in self.trials)
        reports = sum(len(t.reports) for t in self.trials)
        return right / reports if reports else 0.0

    def matrix(self) -> tuple[list[str], dict[str, Counter[str]]]:
        """Return the columns, and by kind of fault how often each cause was reported first."""
        rows: dict[str, Counter[str]] = {}
        for trial in self.trials:
            rows.setdefault(trial.fault, Counter())[trial.said] += 1
        columns = sorted({said for row in rows.values() for said in row})
        return columns, rows

    def delays(self, fault: str) -> tuple[float, float, float] | None:
        """Return median, 99th percentile and mean of the seconds until a kind was known."""
        found = sorted(t.delay for t in self.trials if t.fault == fault and t.delay is not None)
        if not found:
            return None
        late = found[min(len(found) - 1, int(0.99 * len(found)))]
        return statistics.median(found), late, statistics.fmean(found)
