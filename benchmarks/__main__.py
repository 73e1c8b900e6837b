"""``python -m benchmarks``: Allfold side by side with other libraries, as a table."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allfold_cluster.signals import end_in_order
from allfold_core.errors import AllfoldError
from benchmarks import machine, options, pages, requirements, results, runs, table
from benchmarks.devices import CPU
from benchmarks.errors import BenchmarkFailed
from benchmarks.options import Options
from benchmarks.pages import kept
from benchmarks.pages.commands import COMMANDS
from benchmarks.results import LOOPBACK, Report, Result
from benchmarks.scale import report as scale_report


def main() -> None:
    """Measure what the options say; status 1 if it did not work or anything was wrong."""
    chosen = options.parse()
    end_in_order()
    try:
        if chosen.load:
            report = _load(chosen)
        elif chosen.pages:
            report = _measure_pages(sys.argv[1:])
        else:
            report = _measure(chosen)
        _deliver(report, chosen)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    if report.wrong:
        sys.exit(f"benchmarks: {report.wrong} elements were wrong")


def _load(chosen: Options) -> Report:
    requirements.require([], plots=chosen.draws)
    try:
        return results.read(chosen.load)
    except (OSError, ValueError) as error:
        raise BenchmarkFailed(str(error)) from error


def _measure(chosen: Options) -> Report:
    requirements.require(chosen.peers, plots=chosen.draws)
    if reason := runs.why_not(chosen):
        raise BenchmarkFailed(f"not run: {reason}")
    environment = machine.environment(sys.argv[1:])
    _print(
        f"# {environment['cpu']}, {environment['cores']} cores, with a load of "
        f"{environment['load']:.1f} in the minute before; commit {environment['commit']}"
    )
    if priority := environment["priority"]:
        _print(f"# NOT AT ORDINARY PRIORITY: {priority}; these figures show no usual run")
    _print(*(f"# {line}" for line in runs.left_out(chosen)))
    limits = runs.limits(chosen)
    _print(*map(table.limit_row, limits))
    found = list(_results(chosen, limits))
    memories = []
    for memory in runs.memories(chosen):
        memories.append(memory)
        _print(table.memory_row(memory))
    scale = {}
    for part, each in runs.scale(chosen):
        scale[part] = each
        _print(scale_report.table(part, each))
    if not (found or memories or limits or scale):
        raise BenchmarkFailed(runs.NOTHING)
    return Report(environment, found, memories, limits, scale)


def _measure_pages(arguments: Sequence[str]) -> Report:
    """One command after the other; what this machine cannot do is left out, and the run says so."""
    if priority := machine.priority():
        raise BenchmarkFailed(
            f"not run: a page has figures of nice 0, and this process has {priority}"
        )
    reports, left_out = [], []
    for command in COMMANDS:
        _print(f"# --- python -m benchmarks {command}")
        try:
            reports.append(_measure(_possible(options.parse([*command.split(), *arguments]))))
        except (BenchmarkFailed, AllfoldError) as error:  # the minutes before are not lost
            _print(f"# left out: {error}")
            left_out.append(f"{command}: {str(error).splitlines()[0]}")
    if not reports:
        raise BenchmarkFailed(runs.NOTHING)
    run = results.together(reports)
    return replace(run, environment={**run.environment, "left_out": left_out})


def _possible(chosen: Options) -> Options:
    """The same without the peers that are not installed."""
    missing = [peer for peer in chosen.peers if not requirements.is_installed(peer)]
    peers = [peer for peer in chosen.peers if peer not in missing]
    return replace(chosen, peers=peers, left_out=[*chosen.left_out, *missing])


def _results(chosen: Options, limits: Sequence[Mapping[str, Any]]) -> Iterator[Result]:
    """The results, each printed when it is there."""
    copy = next((row["rate"] for row in limits if row["name"] == "copy"), None)
    before: Result | None = None
    found = []
    for result in runs.results(chosen):
        if before is None:
            _print(*table.head())
        is_usual = result.network == LOOPBACK and result.path == CPU
        if not is_usual and (before is None or not _same_place(before, result)):
            _print(table.place(result))
        _print(*table.rows(result))
        if copy and (line := table.shared_rate(result, copy)):
            _print(line)
        before = result
        found.append(result)
        yield result
    _print(*table.behind(found))


def _same_place(one: Result, other: Result) -> bool:
    return (one.network, one.shape) == (other.network, other.shape)


def _deliver(report: Report, chosen: Options) -> None:
    if chosen.json:
        report.write(chosen.json)
    if chosen.plots:
        from benchmarks.plots import draw

        for path in draw(report, chosen.plots):
            _print(f"# {path}")
    if chosen.pages:
        _print(*(f"# {path}" for path in _write_pages(report, chosen.pages, chosen.load)))
    if chosen.markdown:
        from benchmarks.markdown import page

        _print(page(report))


def _write_pages(report: Report, folder: Path, loaded: Sequence[Path]) -> Iterator[Path]:
    if loaded:
        runs = kept.chosen(results.read([path]) for path in loaded)
    else:
        yield kept.keep(folder, report)
        runs = kept.shown(folder)
    yield from pages.write(folder, runs)


def _print(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
