"""The times from faults to recovery, and the table of a run: pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chaos.injector import Done
from chaos.judge import FINDINGS, Finding, Life
from chaos.records import RankLog, Record
from chaos.script import FOLDED, WORLD

_ROW = "{:>27} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}"


def recovery(fault: Done, survivors: Sequence[RankLog]) -> float | None:
    """Return the seconds from a fault's end to an op that all survivors have finished after it.

    The op must show that the fault is mended: its result is without those who were lost. Where
    nobody was, it was called after the fault. ``None`` if there is no such op.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for log in survivors:
        for record in log.records:
            if record.group == WORLD and record.ok and _shows_recovery(fault, record):
                found[record.number].append(record.ended)
    ended = [max(each) for each in found.values() if survivors and len(each) == len(survivors)]
    return min(ended) - fault.over if ended else None


def _shows_recovery(fault: Done, record: Record) -> bool:
    if not fault.seats:
        return record.called >= fault.over
    lost = sum(1 << seat for seat in fault.seats)
    return record.kind in FOLDED and record.ended > fault.at and not record.mask & lost


@dataclass
class Tally:
    """All lives of a run."""

    ops: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    longest_op: float = 0.0
    lives: int = 0

    def add(self, life: Life, faults: Iterable[Done], findings: Iterable[Finding]) -> None:
        """Count a life."""
        self._add_ops(life, findings)
        for fault in faults:
            self.faults[fault.kind.value] += 1
            seconds = recovery(fault, life.survivors)
            if seconds is not None:
                self.recoveries[fault.kind.value].append(seconds)

    def add_churn(
        self, life: Life, changes: Counter[str], faults: Iterable[Done], findings: Iterable[Finding]
    ) -> None:
        """Count the life of an elastic group. No op is done by all who survive it."""
        self._add_ops(life, findings)
        for kind, count in (changes + Counter(fault.kind.value for fault in faults)).items():
            self.faults[f"churn: {kind}"] += count

    def _add_ops(self, life: Life, findings: Iterable[Finding]) -> None:
        self.lives += 1
        self.findings += findings
        for log in life.survivors:
            for record in log.records:
                self.ops["ok" if record.ok else record.code] += 1
                self.longest_op = max(self.longest_op, record.ended - record.called)


def table(tally: Tally) -> str:
    """Return the summary of a run."""
    lines = [
        f"# {tally.lives} lives; ops by outcome, counted per rank: {dict(tally.ops)}",
        f"# the longest op took {tally.longest_op:.3f} s",
        "# ms from a fault's end to the next op that all survivors had finished",
        _ROW.format("fault", "count", "mended", "p50", "p99", "mean", "max"),
    ]
    for kind, count in sorted(tally.faults.items()):
        times = tally.recoveries[kind]
        lines.append(_ROW.format(kind, count, len(times), *_figures(times)))
    broken = Counter(finding.kind for finding in tally.findings)
    lines.append("# " + ", ".join(f"{broken[kind]} {kind}" for kind in FINDINGS))
    return "\n".join(lines)


def _figures(seconds: list[float]) -> list[str]:
    if not seconds:
        return ["-"] * 4
    p99 = sorted(seconds)[math.ceil(len(seconds) * 0.99) - 1]
    found = (statistics.median(seconds), p99, statistics.fmean(seconds))
    return [f"{each * 1e3:.1f}" for each in (*found, max(seconds))]
