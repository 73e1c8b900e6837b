"""The text of a summary: tables of latency, of decoding and of training steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.figures import Figures
from benchmarks.markdown import about, lines, seconds
from benchmarks.plan import DDP, DECODE, KIB, OURS, human_size
from benchmarks.results import Report, Result
from benchmarks.summary.selection import by_mode, by_shape, latencies, libraries, mode, place
from benchmarks.workloads import NO_SYNC

_SHORT_SIZE = 4 * KIB
_EXPLAINED = (
    "Each op is timed by itself, from the last rank's call to the last rank's return, and has data "
    "of its own; every result is compared with NumPy's. *Back to back* is with nothing but the "
    "writing of the data between two ops; in the other tables every rank multiplies matrices "
    "before each op, for so long on a core of its own. Cells are **p50** / p99 / mean and, behind "
    "×, the p50 in units of Allfold's: above 1, Allfold is the faster one."
)
_HOW = "[How this is measured](benchmarks.md), and what the libraries are."
_DECODING = (
    "Tokens per second of [examples/tensor_parallel_llm.py](../examples/tensor_parallel_llm.py), "
    "with 16 all-reduces of 4 KiB per token; below them p50 / p99 / mean of a token."
)
_TRAINING = (
    "The communication of a DistributedDataParallel step of 25 M parameters: what a step takes "
    "longer than under `no_sync()`."
)


def full(report: Report, plots: Iterable[Path]) -> str:
    """Return the page.

    Args:
        plots: relative to the page.
    """
    found = latencies(report.results)
    parts = ["# Latency of short messages", about(report), _EXPLAINED, _HOW]
    parts += [f"![{path.stem.replace('-', ' ')}]({path})" for path in plots]
    for network, before, results in by_mode(found):
        parts.append(f"## All-reduce {before}, {network}")
        for of_shape in by_shape(results):
            parts += [f"### {place(of_shape[0])}", _latency(of_shape), _samples(of_shape)]
    parts += _section("## Decoding", _decoding(report.results, _tokens), _DECODING)
    parts += _section("## Training steps", _training(report.results), _TRAINING)
    return "\n\n".join(parts) + "\n"


def short(report: Report, page: Path, plot: Path, folder: Path) -> str:
    """Return the short form, for a file in a folder: one size of each shape, and one plot."""
    found = latencies(report.results)
    size = min({each.case.size for each in found}, key=lambda size: abs(size - _SHORT_SIZE))
    some = [each for each in found if each.case.size == size]
    what = (
        f"All-reduce of {human_size(size)}, p50 / p99 of single ops, from the last rank's call to "
        f"the last rank's return. {about(report)} "
        f"[All sizes and libraries]({_relative(page, folder)})."
    )
    parts = [what, _short_table(some), f"![Latency over size]({_relative(plot, folder)})"]
    if tokens := _decoding(report.results, _speed):
        parts += ["Tokens per second of tensor-parallel decoding:", lines(tokens)]
    return "\n\n".join(parts) + "\n"


def _latency(results: Sequence[Result]) -> str:
    names = libraries(results)
    head = [["size", *names], ["--:", *["---"] * len(names)]]
    rows = [
        [human_size(each.case.size), *(_cell(each, name) for name in names)] for each in results
    ]
    return lines([*head, *rows])


def _cell(result: Result, name: str) -> str:
    if name not in result.figures:
        return ""
    ratio = "" if name == OURS else f" ×{result.ratio(name):.3g}"
    return _times(result.figures[name]) + ratio


def _times(figures: Figures) -> str:
    wrong = f", {figures.wrong} wrong" if figures.wrong else ""
    return (
        f"**{seconds(figures.median)}** / {seconds(figures.p99)} / {seconds(figures.mean)}{wrong}"
    )


def _samples(results: Iterable[Result]) -> str:
    counts = [each.samples for result in results for each in result.figures.values()]
    few, many = min(counts), max(counts)
    return f"{few} ops per cell." if few == many else f"{few} to {many} ops per cell."


def _short_table(results: Sequence[Result]) -> str:
    names = libraries(results)
    rows = [["nodes × ranks", "", *names], ["---", "---", *["---"] * len(names)]]
    for result in results:
        cells = [
            f"{seconds(figures.median)} / {seconds(figures.p99)}" if figures else ""
            for figures in map(result.figures.get, names)
        ]
        rows.append([place(result), mode(result.case.computing), *cells])
    return lines(rows)


def _decoding(results: Iterable[Result], cell: Callable[[Result, str], str]) -> list[list[str]]:
    found = [each for each in results if each.case.kind == DECODE]
    names = libraries(found)
    rows = [
        [place(each), *(cell(each, name) if name in each.figures else "" for name in names)]
        for each in found
    ]
    return [["nodes × ranks", *names], ["---"] * (len(names) + 1), *rows] if rows else []


def _tokens(result: Result, name: str) -> str:
    return f"{_speed(result, name)}<br>{_times(result.figures[name])}"


def _speed(result: Result, name: str) -> str:
    return f"{result.tokens_per_second(name):.1f}"


def _training(results: Iterable[Result]) -> list[list[str]]:
    found = [each for each in results if each.case.kind == DDP and NO_SYNC in each.figures]
    names = [name for name in libraries(found) if name != NO_SYNC]
    head = ["nodes × ranks", *names, *(f"{OURS} / {name}" for name in names if name != OURS)]
    rows = [head, ["---"] * len(head)]
    for result in found:
        times = [seconds(result.communication(name) or 0.0) for name in names]
        ratios = [result.communication_ratio(name) for name in names if name != OURS]
        told = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append([place(result), *times, *told])
    return rows if found else []


def _section(title: str, rows: list[list[str]], explained: str) -> list[str]:
    return [title, explained, lines(rows)] if rows else []


def _relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path, folder)
