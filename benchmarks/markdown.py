"""The results as tables for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from benchmarks.plan import DDP, MIB, human_size
from benchmarks.results import LOOPBACK, Memory, Report, Result
from benchmarks.workloads import NO_SYNC


def page(report: Report) -> str:
    """One table for each network and shape, under a line that says what it was measured on."""
    parts = [_about(report), "Times are p50 / mean / p99 of the slowest rank."]
    for (network, shape), found in groupby(report.results, lambda each: (each.network, each.shape)):
        results = list(found)
        where = "loopback" if network == LOOPBACK else f"{network}, {_line(results[0])}"
        parts.append(f"### {shape}, {where}\n\n{_table(results)}")
        parts += [_communication(each) for each in results if each.case.kind == DDP]
    if report.memory:
        parts.append(f"### Memory beside the tensors\n\n{_memory(report.memory)}")
    return "\n\n".join(parts) + "\n"


def _about(report: Report) -> str:
    found = report.environment
    versions = ", ".join(f"{name} {each}" for name, each in found["versions"].items() if each)
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['memory']}, Linux {found['kernel']}; "
        f"Python {found['python']}, {versions}; commit {found['commit']}, {found['started']}."
    )


def _line(result: Result) -> str:
    return f"{result.line * 8 / 1e9:.3f} Gbit/s of payload in one TCP stream"


def _table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    peers = names[1:]
    head = ["collective", "size", *names, *(f"{name} / {names[0]}" for name in peers)]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for result in results:
        size = human_size(result.case.size) if result.case.size else ""
        cells = [_time(result, name) for name in names]
        ratios = [_ratio(result, name) for name in peers]
        rows.append([result.case.kind, size, *cells, *ratios])
    return _lines(rows)


def _time(result: Result, name: str) -> str:
    """p50, mean and p99; of what is large, the bus bandwidth too."""
    if name not in result.figures:
        return ""
    figures, busbw = result.figures[name], result.busbw(name)
    wrong = f", {figures.wrong} wrong" if figures.wrong else ""
    times = " / ".join(_seconds(each) for each in (figures.median, figures.mean, figures.p99))
    if busbw is None or result.case.size < MIB:
        return times + wrong
    return f"{times}, {busbw:.3g} GB/s{wrong}"


def _ratio(result: Result, name: str) -> str:
    ratio = result.ratio(name) if name in result.figures else None
    return "" if ratio is None else f"{ratio:.2f}"


def _communication(result: Result) -> str:
    times = [
        f"{name} {_seconds(result.communication(name) or 0.0)}"
        for name in result.figures
        if name != NO_SYNC
    ]
    return f"Communication of a training step, its time less that of `no_sync`: {', '.join(times)}."


def _memory(memories: Iterable[Memory]) -> str:
    rows = [
        ["shape", "all_reduce of", "library", "at most", "kept"],
        ["---", "--:", "---", "--:", "--:"],
    ]
    for each in memories:
        sizes = [f"{value / MIB:.0f} MiB" for value in (each.peak, each.kept)]
        rows.append([str(each.shape), human_size(each.case.size), each.library, *sizes])
    return _lines(rows)


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def _lines(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
