"""The table: nccl-tests' columns, one line per library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.devices import CPU
from benchmarks.plan import DDP, DECODE, OTHERS, OURS, human_size, human_time
from benchmarks.results import Memory, Result
from benchmarks.workloads import NO_SYNC

_NAMES = (
    *("shape", "kind", "size", "before", "library", "p50", "p99", "mean"),
    *("ops", "algbw", "busbw", "#wrong", "ratio", "cpu"),
)
_ROW = "{:>6} {:>14} {:>10} {:>6} {:>17} {:>11} {:>11} {:>11} {:>5} {:>8} {:>8} {:>7} {:>7} {:>9}"
_LEGEND = (
    "float32, sums; size in bytes; p50, p99 and mean in us, of so many single ops, each from the",
    "last rank's call to the last rank's return; before: the computing before each op, 0 is back",
    "to back; algbw and busbw in GB/s, from p50",
    "ratio: the library's p50 in units of Allfold's, so above 1 Allfold is the faster one",
    "cpu: CPU-seconds of all ranks and agents per GB of size",
)


def head() -> list[str]:
    """Return the legend of the columns, and their names."""
    return [*(f"# {line}" for line in _LEGEND), _ROW.format(*_NAMES)]


def rows(result: Result) -> list[str]:
    """One case: a line per library; of tokens their speed, of training steps the communication."""
    case = result.case
    first = (str(result.shape), case.kind, case.size, human_time(case.computing))
    found = [_ROW.format(*first, name, *_columns(result, name)) for name in result.figures]
    if case.kind == DDP and NO_SYNC in result.figures:
        found.append(_communication(result))
    if case.kind == DECODE:
        found.append(_tokens(result))
    return found


def place(result: Result) -> str:
    """Return the path to tensors of GPUs, or the rate of the network between the nodes."""
    if result.path != CPU:
        return f"# {result.shape}: tensors on the GPU take the path {result.path}"
    return f"# {result.shape} on {result.place}"


def behind(results: Sequence[Result]) -> list[str]:
    """For each peer, the cases in which Allfold was the slower one, with the ratio."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name in result.figures:
            ratio = result.ratio(name)
            if name in OTHERS and ratio is not None and ratio < 1:
                case = f"{result.shape} {result.case.title} {human_size(result.case.size)}"
                found.setdefault(name, []).append(f"{case} {ratio:.2f}")
    return [f"# behind {name}: {', '.join(cases)}" for name, cases in found.items()]


def memory_row(memory: Memory) -> str:
    """Return the row of a library's memory beside the tensors."""
    what = f"{memory.shape} {memory.case.kind} of {human_size(memory.case.size)}"
    peak, kept = (f"{each / (1 << 20):.0f} MiB" for each in (memory.peak, memory.kept))
    return f"# memory beside the tensors, {what}: {memory.library} at most {peak}, kept {kept}"


def limit_row(row: Mapping[str, Any]) -> str:
    """Return the row of a GPU's speed within its own memory."""
    rate, time = row["rate"] / 1e9, row["seconds"] * 1e6
    return f"# GPU, {row['name']}: {rate:.0f} GB/s ({time:.0f} us), {row['wrong']} wrong"


def shared_rate(result: Result, copy: float) -> str | None:
    """An all-reduce of ranks that share a GPU: what it moves there, against a plain copy."""
    if result.case.kind != "all_reduce" or OURS not in result.figures:
        return None
    rate = 2 * result.case.size * result.shape.world / result.figures[OURS].median
    return f"# moves {rate / 1e9:.0f} GB/s on the GPU, {rate / copy:.0%} of a plain copy"


def _columns(result: Result, name: str) -> tuple[str, ...]:
    figures = result.figures[name]
    return (
        *(f"{each * 1e6:.1f}" for each in (figures.median, figures.p99, figures.mean)),
        str(figures.samples),
        _number(result.algbw(name), ".3f"),
        _number(result.busbw(name), ".3f"),
        str(figures.wrong),
        _number(result.ratio(name), ".2f"),
        _number(result.cpu_per_gb(name), ".3g"),
    )


def _communication(result: Result) -> str:
    names = [name for name in result.figures if name != NO_SYNC]
    told = ", ".join(f"{name} {(result.communication(name) or 0) * 1e3:.1f} ms" for name in names)
    ratios = [
        f"{OURS}/{name} {ratio:.2f}"
        for name in names
        if name != OURS and (ratio := result.communication_ratio(name)) is not None
    ]
    what = f"communication of a step (its time less that of {NO_SYNC})"
    return f"# {what}: {'; '.join([told, *ratios])}"


def _tokens(result: Result) -> str:
    told = [f"{name} {result.tokens_per_second(name):.1f}" for name in result.figures]
    return f"# tokens per second: {', '.join(told)}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
