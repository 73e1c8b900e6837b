"""The table: nccl-tests' columns, one line per library."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plan import DDP, OURS, PEERS, human_size
from benchmarks.results import Memory, Result
from benchmarks.workloads import NO_SYNC

_NAMES = (
    *("shape", "kind", "size", "count", "type", "redop", "library"),
    *("time", "algbw", "busbw", "#wrong", "ratio", "cpu"),
)
_ROW = "{:>6} {:>14} {:>10} {:>9} {:>8} {:>6} {:>17} {:>11} {:>8} {:>8} {:>7} {:>7} {:>9}"
_LEGEND = (
    "size in bytes; time in us, of the slowest rank, median; algbw and busbw in GB/s",
    "ratio: the library's time in units of Allfold's, so above 1 Allfold is the faster one",
    "cpu: CPU-seconds of all ranks and agents per GB of size",
)


def head() -> list[str]:
    """What the columns mean, and their names."""
    return [*(f"# {line}" for line in _LEGEND), _ROW.format(*_NAMES)]


def rows(result: Result) -> list[str]:
    """One case: a line per library, and what a training step's communication takes."""
    case = result.case
    redop = "sum" if case.reduces else "-"
    first = (str(result.shape), case.kind, case.size, case.size // 4, "float32", redop)
    found = [_ROW.format(*first, name, *_columns(result, name)) for name in result.figures]
    if case.kind == DDP and NO_SYNC in result.figures:
        found.append(_communication(result))
    return found


def place(result: Result) -> str:
    """What the network between the nodes carries."""
    gbit = result.line * 8 / 1e9
    carried = f"{gbit:.3f} Gbit/s = {result.line / 1e9:.4f} GB/s of payload"
    return f"# {result.shape} on {result.network}: one TCP stream carries {carried}"


def behind(results: Sequence[Result]) -> list[str]:
    """For each peer, the cases in which Allfold was the slower one, with the ratio."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name in PEERS:
            ratio = result.ratio(name) if name in result.figures else None
            if name != "plain" and ratio is not None and ratio < 1:
                case = f"{result.shape} {result.case.kind} {human_size(result.case.size)}"
                found.setdefault(name, []).append(f"{case} {ratio:.2f}")
    return [f"# behind {name}: {', '.join(cases)}" for name, cases in found.items()]


def memory_row(memory: Memory) -> str:
    """What a library takes beside the tensors."""
    what = f"{memory.shape} {memory.case.kind} of {human_size(memory.case.size)}"
    peak, kept = (f"{each / (1 << 20):.0f} MiB" for each in (memory.peak, memory.kept))
    return f"# memory beside the tensors, {what}: {memory.library} at most {peak}, kept {kept}"


def _columns(result: Result, name: str) -> tuple[str, ...]:
    figures = result.figures[name]
    return (
        f"{figures.median * 1e6:.1f}",
        _number(result.algbw(name), ".3f"),
        _number(result.busbw(name), ".3f"),
        str(figures.wrong),
        _number(result.ratio(name), ".2f"),
        _number(result.cpu_per_gb(name), ".3g"),
    )


def _communication(result: Result) -> str:
    names = [name for name in result.figures if name != NO_SYNC]
    times = {name: result.communication(name) or 0.0 for name in names}
    told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items())
    ratios = [
        f"{OURS}/{name} {times[OURS] / times[name]:.2f}"
        for name in names
        if name != OURS and times[name] > 0
    ]
    what = f"communication of a step (its time less that of {NO_SYNC})"
    return f"# {what}: {'; '.join([told, *ratios])}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
