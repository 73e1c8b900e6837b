"""The results of each part as a table of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.scale.predictions import NODES


def table(part: str, result: dict[str, Any]) -> str:
    """The table of a part, for people; everything is in the JSON file."""
    rows = {"membership": _machine, "orchestrator": _control, "predictions": _collectives}[part]
    return "\n".join(rows(result)) + "\n"


def _machine(result: dict[str, Any]) -> Iterator[str]:
    yield f"membership alone, {result['nodes']} nodes x {result['ranks_per_node']} ranks"
    for name, value in result.items():
        if name.endswith("_seconds") and isinstance(value, float):
            yield f"  {name.removesuffix('_seconds'):<14} {value * 1e3:10.3f} ms"
    for strategy, seconds in result["compile_program_seconds"].items():
        yield f"  program {strategy:<16} {seconds * 1e3:10.3f} ms"
    yield f"  the plan has {result['plan_bytes']} bytes, {result['compressed_bytes']} compressed"


def _control(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['replicas']} orchestrator(s) on Redis, {result['nodes']} nodes x "
        f"{result['ranks_per_node']} ranks"
    )
    yield (
        f"  {'phase':<11} {'requests':>8} {'wall s':>8} {'per s':>8} {'CPU s':>7} {'Redis s':>7} "
        f"{'p50 ms':>8} {'p99 ms':>8} {'MB out':>8}"
    )
    for name, phase in result["phases"].items():
        yield (
            f"  {name:<11} {phase['requests']:>8} {phase['seconds']:>8.3f} "
            f"{phase['per_second']:>8.0f} {phase['orchestrator_cpu_seconds']:>7.2f} "
            f"{phase['redis_cpu_seconds']:>7.2f} {phase['median_seconds'] * 1e3:>8.2f} "
            f"{phase['p99_seconds'] * 1e3:>8.2f} {phase['received_bytes'] / 1e6:>8.1f}"
        )
    peaks = result["orchestrator_peak_bytes"] / 1e6, result["redis_peak_bytes"] / 1e6
    yield f"  peak memory: orchestrator {peaks[0]:.0f} MB, Redis {peaks[1]:.0f} MB"


def _collectives(result: dict[str, Any]) -> Iterator[str]:
    yield f"a prediction takes {result['seconds_per_prediction'] * 1e6:.1f} us"
    rows = result["predictions"]
    for links in dict.fromkeys(row["links"] for row in rows):
        yield f"fastest all-reduce, {links}"
        yield "  " + f"{'bytes':>12}" + "".join(f"{nodes:>26}" for nodes in NODES)
        for size in dict.fromkeys(row["bytes"] for row in rows):
            found = [row for row in rows if (row["links"], row["bytes"]) == (links, size)]
            best = [min((r for r in found if r["nodes"] == n), key=_seconds) for n in NODES]
            cells = (f"{row['strategy']:>17} {_shown(row['seconds']):>8}" for row in best)
            yield "  " + f"{size:>12}" + "".join(cells)


def _seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"])


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f}ms"
