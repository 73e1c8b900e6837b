"""The runs that are kept in the repository, and which of them the page is made of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks import results
from benchmarks.results import Report

FOLDER = "bench"
"""Beside the page."""


def keep(folder: Path, run: Report) -> Path:
    """Write a run into the folder of a page; its path."""
    kept = folder / FOLDER
    kept.mkdir(exist_ok=True)
    path = kept / f"{run.environment['started'][:16].replace(':', '')}.json"
    run.write_short(path)
    return path


def shown(folder: Path) -> list[Report]:
    """Return the newest run of a folder and the newest of another day or machine, if there is one.

    Raises:
        OSError, ValueError: a file cannot be read, or is none of a run.
    """
    return chosen(results.read([path]) for path in (folder / FOLDER).glob("*.json"))


def chosen(runs: Iterable[Report]) -> list[Report]:
    """Return the newest of the runs and the newest of another day or machine."""
    newest_first = sorted(runs, key=_started, reverse=True)
    others = [run for run in newest_first if _where(run) != _where(newest_first[0])]
    return [*newest_first[:1], *others[:1]]


def _started(run: Report) -> str:
    return str(run.environment["started"])


def _where(run: Report) -> tuple[object, ...]:
    found = run.environment
    machine = found.get("machine"), found["cpu"], found["cores"], found["memory"]
    return _started(run)[:10], *machine
