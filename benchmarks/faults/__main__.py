"""``python -m benchmarks.faults``: a table of what faults cost, Allfold and others in one run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults import cost, losses, reform, steady
from benchmarks.faults.allfold_contestant import VARIABLES
from benchmarks.faults.measuring import Row
from benchmarks.faults.options import Options, parse

_LEGEND = (
    "ms from a fault until every survivor has finished an op without the lost: the slowest counts;",
    "error: the median until every survivor had an error or a result; victim: its resident MiB;",
    "load: of the machine in the minute before the row, with what the row itself brings",
)
_NAMES = (
    *("what", "shape", "library", "faults", "recovered"),
    *("p50", "p99", "mean", "max", "error", "victim", "load", "to reach"),
)
_ROW = "{:<42} {:>5} {:>14} {:>6} {:>9} {:>8} {:>8} {:>8} {:>8} {:>7} {:>6} {:>5}  {}"


def main() -> None:
    """Measure the rows that the options name, and print each when it is there."""
    options = parse()
    os.environ |= VARIABLES
    environment = machine.environment(sys.argv[1:])
    _print(f"# {environment['cpu']}, {environment['cores']} cores; commit {environment['commit']}")
    load = os.getloadavg()[0]
    _print(f"# load before the run: {load:.1f}; on_loss {options.on_loss}; ops of 4 KiB")
    _print(*(f"# {line}" for line in _LEGEND), _ROW.format(*_NAMES))
    found = []
    try:
        for measured in _rows(options):
            row = replace(measured, load=os.getloadavg()[0])
            found.append(row)
            _print(*line_of(row))
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.faults: {error}")
    finally:
        if options.json:
            told = {"environment": environment, "rows": [asdict(row) for row in found]}
            options.json.write_text(json.dumps(told, indent=1) + "\n")


def _rows(options: Options) -> Iterator[Row]:
    others = {
        "reform": reform.rows,
        "reset": steady.resets,
        "slow-link": steady.slow_link,
        "false-evictions": steady.false_evictions,
        "cost": cost.rows,
    }
    for name in options.rows:
        if name in losses.LOSSES:
            yield from losses.rows(name, options)
        else:
            yield from others[name](options)


def line_of(row: Row) -> Sequence[str]:
    """Return a row as a line of the table, and its note."""
    line = _ROW.format(
        row.what,
        row.shape,
        row.library,
        row.faults or "",
        "" if row.recovered is None else f"{row.recovered:.1%}",
        *map(_ms, (row.p50, row.p99, row.mean, row.max, row.outcome_p50)),
        "" if row.resident is None else row.resident >> 20,
        "" if row.load is None else f"{row.load:.1f}",
        row.target,
    )
    return [line.rstrip(), *([f"  # {row.note}"] if row.note else [])]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _print(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
