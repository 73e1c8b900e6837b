"""The time that every case and every file of the tests takes, and what a case may take.

``tests/times.tsv`` has the times as they were measured on two cores: each file with its cases and
seconds, and each case that takes longer than its kind may. Those are known; every other case over
its budget is listed at the end of a run. ``make times`` measures anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TIMES = Path(__file__).parents[1] / "times.tsv"
CASE_SECONDS = 1.0
PROCESS_SECONDS = 5.0
# A known slow case is listed again once it takes so many times what it took.
TOLERANCE = 2.0
_LISTED = 20
_HEAD = "seconds\tcases\tof"

Row = tuple[float, int, str]

# Their tests start processes, or drive those of a shared stack of services.
PROCESS_FOLDERS = (
    "benchmarks",
    "browser",
    "chaos",
    "clients",
    "conformance",
    "cuda",
    "deploy",
    "e2e",
    "fuzz",
    "gpu",
    "metrics",
    "torch_backend",
)
PROCESS_MARKERS = frozenset({"slow", "redis", "docker", "chaos"})


@dataclass
class Times:
    """Seconds of each file, whole, and of each case without the making of its fixtures."""

    files: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cases: dict[str, float] = field(default_factory=dict)
    processes: set[str] = field(default_factory=set)

    def add(self, report: pytest.TestReport) -> None:
        """Take in one phase of a case: what fixtures of a whole module cost is the file's."""
        file = report.nodeid.partition("::")[0]
        self.files[file] += report.duration
        if report.when == "call":
            self.counts[file] += 1
            self.cases[report.nodeid] = report.duration
            if uses_processes(file, report.keywords):
                self.processes.add(report.nodeid)

    def budget(self, case: str) -> float:
        """Return the seconds that a case of its kind may take."""
        return PROCESS_SECONDS if case in self.processes else CASE_SECONDS

    def over_budget(self, known: Mapping[str, float]) -> list[tuple[float, float, str]]:
        """Return the seconds, the budget and the name of each case over it, the slowest first."""
        over = []
        for case, seconds in self.cases.items():
            budget = max(self.budget(case), TOLERANCE * known.get(case, 0.0))
            if seconds > budget:
                over.append((seconds, budget, case))
        return sorted(over, reverse=True)

    def table(self, before: str = "") -> str:
        """Return the text of ``tests/times.tsv``: of what was not run, the rows of ``before``."""
        files = [(t, self.counts.get(file, 0), file) for file, t in self.files.items()]
        files += [row for row in _rows(before) if _is_file(row) and row[2] not in self.files]
        slow = [(t, 1, case) for case, t in self.cases.items() if t > self.budget(case)]
        slow += [row for row in _rows(before) if not _is_file(row) and row[2] not in self.cases]
        rows = sorted(files, reverse=True) + sorted(slow, reverse=True)
        return "\n".join([_HEAD, *(f"{t:.1f}\t{n}\t{name}" for t, n, name in rows), ""])


def uses_processes(file: str, keywords: Iterable[str]) -> bool:
    """Return True for a test that starts processes, by its folder and its markers."""
    folder = file.removeprefix("tests/").partition("/")[0]
    return folder in PROCESS_FOLDERS or not PROCESS_MARKERS.isdisjoint(keywords)


def known_cases(table: str) -> dict[str, float]:
    """Return the seconds of the slow cases that a table has."""
    return {row[2]: row[0] for row in _rows(table) if not _is_file(row)}


def _rows(table: str) -> list[Row]:
    split = (line.split("\t") for line in table.splitlines()[1:])
    return [(float(seconds), int(cases), name) for seconds, cases, name in split]


def _is_file(row: Row) -> bool:
    return "::" not in row[2]


def by_time(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items with those first whose file takes longest, so that none is left for the end.

    The files of a folder stay together: they share services. The cases of a file stay in order.
    """
    known = _known_files(TIMES.read_text()) if TIMES.exists() else {}
    longest: dict[str, float] = defaultdict(float)
    for file, seconds in known.items():
        longest[_folder(file)] = max(longest[_folder(file)], seconds)

    def place(item: pytest.Item) -> tuple[float, str, float, str]:
        file = item.nodeid.partition("::")[0]
        folder = _folder(file)
        return -longest[folder], folder, -known.get(file, 0.0), file

    return sorted(items, key=place)


def _folder(file: str) -> str:
    return "/".join(file.split("/")[:2])


def _known_files(table: str) -> dict[str, float]:
    return {row[2]: row[0] for row in _rows(table) if _is_file(row)}


class Budget:
    """Plugin of pytest: measures all cases of a run, and lists those over their budget."""

    def __init__(self, config: pytest.Config) -> None:
        self._writes = bool(config.getoption("write_times"))
        self._times = Times()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._times.add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        known = known_cases(TIMES.read_text()) if TIMES.exists() else {}
        over = self._times.over_budget(known)
        if over:
            terminalreporter.section(f"{len(over)} cases over their budget of time")
            for seconds, budget, case in over[:_LISTED]:
                terminalreporter.write_line(f"{seconds:6.1f} s of {budget:4.1f} s  {case}")
        if self._writes:
            TIMES.write_text(self._times.table(TIMES.read_text() if TIMES.exists() else ""))
            terminalreporter.write_line(f"wrote {TIMES}")
