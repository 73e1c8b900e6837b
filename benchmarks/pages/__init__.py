"""The page of performance: its tables and plots, made of the runs that are kept beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkFailed
from benchmarks.pages.page import IMAGES, blocks
from benchmarks.pages.selection import Measured
from benchmarks.results import Report
from tools.pages import renewed

PAGE = "performance.md"


def write(folder: Path, runs: Sequence[Report]) -> Iterator[Path]:
    """Write the made parts of the page in a folder, and its plots; the files' paths.

    Args:
        runs: one or two, the newest first.

    Raises:
        BenchmarkFailed: there is no such page, or it has no place for one of the parts.
    """
    from benchmarks.pages import plots  # which needs matplotlib

    yield from plots.draw(Measured(runs), folder / IMAGES)
    page = folder / PAGE
    try:
        page.write_text(renewed(PAGE, page.read_text(), blocks(runs)))
    except (OSError, ValueError) as error:
        raise BenchmarkFailed(str(error)) from error
    yield page
