"""The results as tables for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from benchmarks.plan import DDP, DECODE, MIB, OURS, human_size
from benchmarks.results import Memory, Report, Result
from benchmarks.workloads import NO_SYNC

TIMES = (
    "Times are p50 / p99 / mean of single ops, from the last rank's call to the last rank's return."
)


def page(report: Report) -> str:
    """One table for each network and shape, under a line that says what it was measured on."""
    parts = [about(report), TIMES]
    for (_, shape), found in groupby(report.results, lambda each: (each.network, each.shape)):
        results = list(found)
        parts.append(f"### {shape}, {results[0].place}\n\n{_table(results)}")
        parts += [_communication(each) for each in results if each.case.kind == DDP]
        parts += [_tokens(each) for each in results if each.case.kind == DECODE]
    if report.memory:
        parts.append(f"### Memory beside the tensors\n\n{_memory(report.memory)}")
    return "\n\n".join(parts) + "\n"


def about(report: Report) -> str:
    """Return the line that says what a report was measured on."""
    found = report.environment
    versions = ", ".join(f"{name} {each}" for name, each in found["versions"].items() if each)
    priority = f", and **{found['priority']}**" if found.get("priority") else ""
    machine = f" (machine {found['machine']})" if found.get("machine") else ""
    return (
        f"{found['cpu']}{machine}, {found['cores']} cores, {found['memory']}, "
        f"Linux {found['kernel']}; Python {found['python']}, {versions}; "
        f"commit {found['commit']}, {found['started']}, "
        f"with a load of {found['load']:.1f} in the minute before{priority}."
    )


def _table(results: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    peers = names[1:]
    head = ["collective", "size", *names, *(f"{name} / {names[0]}" for name in peers)]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for result in results:
        size = human_size(result.case.size) if result.case.size else ""
        cells = [_time(result, name) for name in names]
        ratios = [_ratio(result, name) for name in peers]
        rows.append([result.case.title, size, *cells, *ratios])
    return lines(rows)


def _time(result: Result, name: str) -> str:
    """Return the times; of what is large, the bus bandwidth too."""
    if name not in result.figures:
        return ""
    figures, busbw = result.figures[name], result.busbw(name)
    wrong = f", {figures.wrong} wrong" if figures.wrong else ""
    times = " / ".join(map(seconds, (figures.median, figures.p99, figures.mean)))
    if busbw is None or result.case.size < MIB:
        return times + wrong
    return f"{times}, {busbw:.3g} GB/s{wrong}"


def _ratio(result: Result, name: str) -> str:
    ratio = result.ratio(name) if name in result.figures else None
    return "" if ratio is None else f"{ratio:.2f}"


def _communication(result: Result) -> str:
    names = [name for name in result.figures if name != NO_SYNC]
    times = [f"{name} {seconds(result.communication(name) or 0.0)}" for name in names]
    ratios = [
        f"{OURS} / {name} {ratio:.2f}"
        for name in names
        if name != OURS and (ratio := result.communication_ratio(name)) is not None
    ]
    what = "Communication of a training step, its time less that of `no_sync`"
    return f"{what}: {', '.join([*times, *ratios])}."


def _tokens(result: Result) -> str:
    told = [f"{name} {result.tokens_per_second(name):.1f}" for name in result.figures]
    return f"Tokens per second: {', '.join(told)}."


def _memory(memories: Iterable[Memory]) -> str:
    rows = [
        ["shape", "all_reduce of", "library", "at most", "kept"],
        ["---", "--:", "---", "--:", "--:"],
    ]
    for each in memories:
        sizes = [f"{value / MIB:.0f} MiB" for value in (each.peak, each.kept)]
        rows.append([str(each.shape), human_size(each.case.size), each.library, *sizes])
    return lines(rows)


def seconds(value: float) -> str:
    """``1.3 µs``, ``240 µs``, ``2.1 ms``: three digits at most."""
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if value < 999.5 * unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.3g} s"


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Return the rows of a table, the first of which is its head."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
