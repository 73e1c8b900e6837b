"""The page of latencies with its plots, and its short form in another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.results import Report
from benchmarks.summary import plots
from benchmarks.summary.page import full, short
from benchmarks.summary.selection import latencies

IMAGES = Path("images") / "bench"
"""Beside the page."""
BEGIN, END = "<!-- made by python -m benchmarks --summary -->", "<!-- end -->"


def write(report: Report, page: Path, other: Path | None) -> Iterator[Path]:
    """Write the page, its plots and, where it is asked for, the short form; their paths.

    Raises:
        BenchmarkFailed: no result is one of latency, or the other page has no marks.
    """
    found = latencies(report.results)
    if not found:
        raise BenchmarkFailed("a summary is of all-reduces up to 1 MiB, of which there is none")
    drawn = plots.draw(found, page.parent / IMAGES)
    yield from drawn
    page.write_text(full(report, [path.relative_to(page.parent) for path in drawn]))
    yield page
    if other:
        _insert(other, short(report, page, drawn[0], other.parent))
        yield other


def _insert(other: Path, text: str) -> None:
    marks = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)
    replaced, times = marks.subn(lambda _: text, other.read_text())
    if times != 1:
        raise BenchmarkFailed(f"{other} does not have once a line {BEGIN} and then {END}")
    other.write_text(replaced)
