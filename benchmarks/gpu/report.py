"""What was found: as rows of a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures
from benchmarks.gpu.plan import (
    ARENA,
    BANDWIDTH,
    LATENCY,
    OTHERS,
    SWEEP,
    TARGET,
    copy_bytes,
    fold_bytes,
)
from benchmarks.plan import Shape, human_size

_FORMAT = 1
_GB, _US = 1e9, 1e6
_SHOWN_FAILURES = 12
_SHOWN_CALLS = 2
_SHOWN_CHARACTERS = 240


@dataclass(frozen=True)
class Check:
    """All calls of one setting, on all ranks.

    Attributes:
        wrong: elements, over all ranks.
        first: some of the calls in which they were.
    """

    setting: str
    calls: int
    wrong: int
    first: Sequence[str]
    seconds: float


@dataclass(frozen=True)
class Timing:
    """One size of one contestant.

    Attributes:
        part: of which it is.
        size: bytes of each rank's tensor.
        path: which way the tensors of rank 0 took.
    """

    part: str
    shape: Shape
    size: int
    contestant: str
    path: str
    figures: Figures

    @property
    def rate(self) -> float:
        """Bytes per second, if each rank's tensor is read once and written once."""
        return fold_bytes(self.size, self.shape.world) / self.figures.median


@dataclass
class Report:
    """A run.

    Attributes:
        device: what the ranks say of it.
        copy: see :mod:`benchmarks.gpu.copy_limit`; empty if it was not measured.
        kernel: rows of :mod:`benchmarks.gpu.fold_kernel`.
        unable: peers that do not work here, with what they say.
        sanitizer: findings by agent.
        failures: what did not work, in words.
        left_out: for lack of time.
        notes: what a reader has to know.
    """

    environment: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    copy: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    kernel: list[dict[str, Any]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    unable: dict[str, str] = field(default_factory=dict)
    sanitizer: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Elements that were wrong, in all."""
        return (
            sum(check.wrong for check in self.checks)
            + sum(timing.figures.wrong for timing in self.timings)
            + sum(int(row["wrong"]) for row in self.kernel)
            + int(self.copy.get("wrong", 0))
        )

    @property
    def is_good(self) -> bool:
        """Whether all that was asked for was done, and nothing was wrong."""
        faults = [self.wrong, sum(self.sanitizer.values()), self.failures, self.left_out]
        return not any(faults)

    def write(self, path: Path) -> None:
        """As JSON."""
        found = asdict(self) | {"format": _FORMAT, "wrong": self.wrong, "good": self.is_good}
        path.write_text(json.dumps(found, indent=1) + "\n")

    def ratio(self, rate: float) -> float | None:
        """Of the speed of a plain copy; ``None`` if that was not measured."""
        return rate / self.copy["rate"] if self.copy else None


def lines(report: Report) -> Iterator[str]:
    """The table; the verdict is its last line."""
    yield "=" * 30 + " benchmarks.gpu " + "=" * 30
    yield _about(report)
    if report.copy:
        copy = report.copy
        moved = human_size(copy_bytes(copy["size"]))
        yield (
            f"plain copy: {copy['rate'] / _GB:.0f} GB/s ({moved} moved in "
            f"{copy['seconds'] * _US:.0f} us, median); {copy['wrong']} wrong"
        )
    yield from _checks(report)
    yield from _bandwidth(report)
    yield from _kernel(report)
    yield from _latency(report)
    yield from _sweep(report)
    for name, why in report.unable.items():
        yield f"{name} does not work here: {why[:_SHOWN_CHARACTERS]}"
    for agent, found in report.sanitizer.items():
        yield f"compute-sanitizer, {agent}: {found} findings"
    yield from _faults(report)


def summary(failure: str) -> str:
    """A failure in a line: what failed, and of a traceback the error."""
    first, *rest = failure.splitlines() or [""]
    if rest and rest[0].startswith("Traceback"):
        error = next((line for line in rest[1:] if line and not line.startswith(" ")), "")
        first = f"{first} {error}"
    return first[:_SHOWN_CHARACTERS]


def _about(report: Report) -> str:
    device, where = report.device, report.environment
    parts = [
        str(device.get("name", "no GPU")),
        str(device.get("driver") or ""),
        f"torch {device.get('torch')}",
        f"{where.get('cores')} cores",
        f"commit {where.get('commit')}",
        str(where.get("started", "")),
    ]
    return "; ".join(part for part in parts if part)


def _checks(report: Report) -> Iterator[str]:
    if not report.checks:
        return
    yield "-- correctness: agents x ranks, path of each rank's tensors"
    for check in report.checks:
        verdict = "all right" if not check.wrong else f"{check.wrong} ELEMENTS WRONG"
        yield f"{check.setting:<36} {check.calls:>4} calls {check.seconds:>6.1f} s  {verdict}"
        yield from (f"    {each[:_SHOWN_CHARACTERS]}" for each in check.first[:_SHOWN_CALLS])


def _bandwidth(report: Report) -> Iterator[str]:
    found = [timing for timing in report.timings if timing.part == BANDWIDTH]
    if not found:
        return
    yield "-- all-reduce float32 of large tensors on one agent; rate: each tensor read and written"
    yield f"   ({TARGET:.0%} of a copy are asked of {ARENA} alone: others are copied as well)"
    yield f"{'':<10}{'ranks':>6}{'size':>9}{'path':>8}{'ms':>9}{'p90':>9}{'GB/s':>7}{'of copy':>9}"
    for timing in found:
        figures, ratio = timing.figures, report.ratio(timing.rate)
        verdict = ""
        if ratio is not None and timing.contestant == ARENA:
            verdict = f"{'reaches' if ratio >= TARGET else 'BELOW'} {TARGET:.0%}"
        yield (
            f"{timing.contestant:<10}{timing.shape.world:>6}{human_size(timing.size):>9}"
            f"{timing.path:>8}{figures.median * 1e3:>9.3f}{figures.p90 * 1e3:>9.3f}"
            f"{timing.rate / _GB:>7.0f}{_percent(ratio):>9}  {verdict}"
        )


def _kernel(report: Report) -> Iterator[str]:
    if not report.kernel:
        return
    grids = list(dict.fromkeys(row["grid"] for row in report.kernel))
    names = [str(grid) if grid else "agent's" for grid in grids]
    yield "-- the fold kernel alone, GB/s (and of a copy), by blocks per multiprocessor"
    yield f"{'':<20}" + "".join(f"{name:>13}" for name in names)
    cells: dict[str, list[str]] = {}
    for row in report.kernel:
        name = f"{row['dtype']} {'in place' if row['in_place'] else 'apart'}"
        cell = f"{row['rate'] / _GB:.0f} {_percent(report.ratio(row['rate']))}"
        cells.setdefault(name, []).append(cell)
    for name, found in cells.items():
        yield f"{name:<20}" + "".join(f"{cell:>13}" for cell in found)


def _latency(report: Report) -> Iterator[str]:
    found = [timing for timing in report.timings if timing.part == LATENCY]
    if not found:
        return
    yield f"-- latency of all-reduce, {human_size(found[0].size)}, us"
    yield f"{'':<8}{'':<10}{'path':>8}{'median':>10}{'p90':>10}{'least':>10}{'ops':>7}"
    for timing in found:
        figures = timing.figures
        times = (figures.median, figures.p90, figures.least)
        yield (
            f"{timing.shape!s:<8}{timing.contestant:<10}{_path(timing):>8}"
            + "".join(f"{each * _US:>10.1f}" for each in times)
            + f"{figures.samples:>7}"
        )


def _sweep(report: Report) -> Iterator[str]:
    found = [timing for timing in report.timings if timing.part == SWEEP]
    if not found:
        return
    yield "-- all-reduce by size, us, median of the slowest rank"
    columns = list(dict.fromkeys((timing.shape, timing.contestant) for timing in found))
    yield f"{'':<9}" + "".join(f"{f'{shape} {name}':>15}" for shape, name in columns)
    for size in sorted({timing.size for timing in found}):
        times = {
            (timing.shape, timing.contestant): timing.figures.median
            for timing in found
            if timing.size == size
        }
        cells = [f"{times[each] * _US:.1f}" if each in times else "-" for each in columns]
        yield f"{human_size(size):<9}" + "".join(f"{cell:>15}" for cell in cells)


def _faults(report: Report) -> Iterator[str]:
    for each in dict.fromkeys(report.notes):
        yield f"note: {each[:_SHOWN_CHARACTERS]}"
    for each in report.left_out:
        yield f"left out: {each}"
    for failure in report.failures[:_SHOWN_FAILURES]:
        yield f"FAILED: {failure}"
    if (more := len(report.failures) - _SHOWN_FAILURES) > 0:
        yield f"FAILED: {more} more"
    told = f"{report.wrong} elements wrong, {len(report.failures)} failures"
    yield f"benchmarks.gpu: {'good' if report.is_good else 'NOT GOOD'}: {told}"


def _path(timing: Timing) -> str:
    return "-" if timing.contestant in OTHERS else timing.path


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
