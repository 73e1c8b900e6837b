"""``python -m benchmarks.rounds``: a table for each part of what rounds must reach."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from allfold_core.errors import AllfoldError
from benchmarks import machine
from benchmarks.errors import BenchmarkFailed
from benchmarks.markdown import lines
from benchmarks.rounds import kills, peers, share, slow, sweep, volume
from benchmarks.rounds.options import Options, parse

Row = dict[str, Any]


class Part(NamedTuple):
    """A table: its columns, and what measures its rows one after the other."""

    head: Sequence[str]
    rows: Callable[[Options], Iterator[Row]]


PARTS = {
    "share": Part(share.HEAD, share.rows),
    "bytes": Part(volume.HEAD, volume.rows),
    "slow": Part(slow.HEAD, slow.rows),
    "kills": Part(kills.HEAD, kills.rows),
    "peers": Part(peers.HEAD, peers.rows),
    "sweep": Part(sweep.HEAD, sweep.rows),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the parts that the options name, and print each row when it is there."""
    options = parse(arguments)
    about = machine.environment(sys.argv[1:])
    priority = f"; {about['priority']}" if about["priority"] else ""
    print(f"# {about['cpu']}, {about['cores']} cores; commit {about['commit']}{priority}")
    print(f"# load before the run: {os.getloadavg()[0]:.1f}", flush=True)
    found: dict[str, list[Row]] = {}
    try:
        for name in options.parts:
            found[name] = []
            for row in _printed(name, PARTS[name], options):
                found[name].append(row)
    except (BenchmarkFailed, AllfoldError) as error:
        sys.exit(f"benchmarks.rounds: {error}")
    finally:
        if options.json:
            told = {"environment": about, "rows": found}
            options.json.write_text(json.dumps(told, indent=1) + "\n")


def _printed(name: str, part: Part, options: Options) -> Iterator[Row]:
    """Print the rows of a part as they come; yields each."""
    began = time.monotonic()
    print(f"\n### {name}\n")
    print(lines([part.head, ["---", *["--:"] * (len(part.head) - 1)]]), flush=True)
    for row in part.rows(options):
        print(lines([[str(row.get(column, "")) for column in part.head]]), flush=True)
        yield row | {"load": os.getloadavg()[0]}
    took = time.monotonic() - began
    print(f"\n{took:.0f} s, load at the end: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
