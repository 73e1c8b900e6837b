"""The time of fault-free ops of this checkout and of another one, measured in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.children import ROOT, environment
from benchmarks.errors import BenchmarkFailed
from benchmarks.faults.measuring import Row
from benchmarks.faults.options import Options
from benchmarks.plan import MIB

_WHAT = "fault-free all-reduce"
_SHAPE = "2x1"
_TARGETS = {4096: "<= +3 %", 64 * MIB: "<= +1 %"}
_ROUNDS = 12
_SECONDS = 300.0


def rows(options: Options) -> Iterator[Row]:
    """Measure this checkout and the other one, round by round."""
    if options.against is None:
        yield Row(_WHAT, "allfold", _SHAPE, note="not measured: --against names no other checkout")
        return
    checkouts = [ROOT, options.against.resolve()]
    found: dict[Path, dict[int, list[float]]] = {each: {} for each in checkouts}
    for number in range(_ROUNDS):
        # In turn, so that neither is always the one that comes first.
        for checkout in checkouts if number % 2 else checkouts[::-1]:
            for size, median in _run(checkout).items():
                found[checkout].setdefault(size, []).append(median)
    ours, theirs = found.values()
    for size, target in _TARGETS.items():
        ratios = [now / before for now, before in zip(ours[size], theirs[size], strict=True)]
        middle = statistics.median(ratios) - 1
        least, most = min(ratios) - 1, max(ratios) - 1
        before = statistics.median(theirs[size])
        fastest = min(ours[size]) / min(theirs[size]) - 1
        note = (
            f"{middle:+.1%} against {before * 1e6:.0f} us: the median of {_ROUNDS} pairs of runs; "
            f"{fastest:+.1%} between the fastest run of each"
        )
        yield Row(
            f"{_WHAT}, {size} bytes",
            "allfold",
            _SHAPE,
            target,
            p50=statistics.median(ours[size]),
            note=f"{note}; pairs are from {least:+.1%} to {most:+.1%}",
        )


def _run(checkout: Path) -> dict[int, float]:
    """Run the benchmark of a checkout; the median seconds by size."""
    python = checkout / ".venv" / "bin" / "python"
    sizes = ",".join(map(str, _TARGETS))
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [str(python if python.exists() else sys.executable), "-m", "benchmarks"]
        command += ["--shapes", _SHAPE, "--kinds", "all_reduce", "--sizes", sizes]
        command += ["--peers", "none", "--json", str(results)]
        done = subprocess.run(
            command,
            cwd=checkout,
            env=environment() | {"PYTHONPATH": _python_path(checkout)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise BenchmarkFailed(f"the benchmark of {checkout} failed:\n{done.stderr[-2000:]}")
        found = json.loads(results.read_text())["results"]
    return {each["size"]: each["libraries"]["allfold"]["median"] for each in found}


def _python_path(checkout: Path) -> str:
    """The folders of a checkout's packages, which go ahead of those that are installed.

    Without them, one that has no environment of its own would be measured with our packages.
    """
    return os.pathsep.join(map(str, [checkout, *sorted(checkout.glob("*/src"))]))
