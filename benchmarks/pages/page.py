"""The text of the page: tables of one or two runs, the newer one's line above the other's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.markdown import about, lines, seconds
from benchmarks.pages.selection import ABSENT, Key, Measured, by_mode
from benchmarks.plan import (
    DDP,
    DECODE,
    KIB,
    KINDS,
    MIB,
    OTHERS,
    OURS,
    THROUGH_TORCH,
    Shape,
    human_size,
)
from benchmarks.results import LOOPBACK, Report, Result

IMAGES = "images/bench"
"""Beside the page."""
_ALL_REDUCE = "all_reduce"
_GLOO = "gloo"
_HEADLINE = (4 * KIB, 16 * MIB)
_NOTHING = "Nothing has been measured for this page yet; `make bench-pages` does it."
_ONE_RUN = "All figures are of **this one run**: there is none of another day or machine yet."
_TWO_RUNS = "The first line of each cell is of the first run, the second of the other."
_NEVER = "In none of the cases of these runs."


def blocks(runs: Sequence[Report]) -> Mapping[str, Callable[[], str]]:
    """Return what makes each part of the page, by its name.

    Args:
        runs: at most two, the newest first.
    """
    found = Measured(runs)
    others = [kind for kind in KINDS if kind != _ALL_REDUCE]
    makers: dict[str, Callable[[], Sequence[str]]] = {
        "runs": lambda: _runs(runs),
        "all-reduce": lambda: _by_mode(found, found.of_kinds(_ALL_REDUCE), is_drawn=True),
        "collectives": lambda: _by_mode(found, found.of_kinds(*others)),
        "training": lambda: [_times_table(found, found.of_kinds(DDP))],
        "decoding": lambda: [_speed_table(found, found.of_kinds(DECODE))],
        "behind": lambda: [_behind(found)],
    }
    return {name: partial(_made, make) for name, make in makers.items()}


def _made(make: Callable[[], Sequence[str]]) -> str:
    return _text(make())


def headline(runs: Sequence[Report]) -> str:
    """Return a table of all-reduces of the newest run, in both rhythms, beside those of Gloo.

    Args:
        runs: the newest first.
    """
    found = Measured(runs[:1])
    keys = [key for key in found.of_kinds(_ALL_REDUCE) if key.network == LOOPBACK]
    modes = by_mode(key for key in keys if key.case.size in _HEADLINE)
    head = ["nodes × ranks", "tensor"]
    rows: dict[tuple[Shape, int], list[str]] = {}
    for mode, some in modes.items():
        head += [f"Allfold, {mode.rhythm}", "Gloo", "Gloo / Allfold"]
        for key in some:
            cells = [found.cell(key, name, _short_times(name)) for name in (OURS, _GLOO)]
            row = rows.setdefault((key.shape, key.case.size), [])
            row += [*cells, found.cell(key, _GLOO, _ratio(OURS))]
    body = [[str(shape), human_size(size), *cells] for (shape, size), cells in rows.items()]
    table = lines([head, ["---", "--:", *["--:"] * (len(head) - 2)], *body])
    return _text([about(runs[0]), table] if rows else [])


def _short_times(name: str) -> Callable[[Result], str]:
    def tell(result: Result) -> str:
        return " / ".join(map(seconds, (result.figures[name].median, result.figures[name].p99)))

    return tell


def _text(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n" if any(parts) else f"{_NOTHING}\n"


def _runs(runs: Sequence[Report]) -> list[str]:
    told = []
    for number, run in enumerate(runs, 1):
        command = " ".join(["python -m benchmarks", *run.environment["arguments"]])
        told.append(f"{number}. {about(run)} (`{command}`)")
        told += [f"    - Left out: {each}" for each in run.environment.get("left_out", [])]
    return ["\n".join(told), _ONE_RUN if len(runs) == 1 else _TWO_RUNS] if runs else []


def _by_mode(found: Measured, keys: Sequence[Key], *, is_drawn: bool = False) -> list[str]:
    parts = []
    for mode, some in by_mode(keys).items():
        parts.append(f"### {mode.rhythm.capitalize()}, {found.newest(some[0]).place}")
        if is_drawn and has_curve(some):
            parts.append(f"![Latency over size, {mode.rhythm}]({IMAGES}/{mode.file_name})")
        parts.append(_times_table(found, some))
    return parts


def has_curve(keys: Sequence[Key]) -> bool:
    """Return whether several sizes of these were measured, of which a plot is drawn."""
    return len({key.case.size for key in keys}) > 1


def _times_table(found: Measured, keys: Sequence[Key]) -> str:
    """Return the times of every library, and Gloo's and its CPU time in units of Allfold's."""
    names = found.libraries(keys)
    ours = [name for name in (OURS, THROUGH_TORCH) if {name, _GLOO} <= {*names}]
    ratios = [*(f"{_GLOO} / {name}" for name in ours), *(["CPU time"] if ours else [])]
    head = ["", "nodes × ranks", "size", *names, *ratios]
    rows = [head, ["---", "---", *["--:"] * (len(head) - 2)]]
    for key in keys:
        size = human_size(key.case.size) if key.case.size else ""
        cells = [found.cell(key, name, _times(name)) for name in names]
        cells += [found.cell(key, _GLOO, _ratio(name)) for name in ours]
        cells += [found.cell(key, _GLOO, _cpu_ratio)] if ours else []
        rows.append([key.case.kind, str(key.shape), size, *cells])
    return lines(rows) if keys else ""


def _times(name: str) -> Callable[[Result], str]:
    def tell(result: Result) -> str:
        figures = result.figures[name]
        times = " / ".join(map(seconds, (figures.median, figures.p99, figures.mean)))
        return f"{times}, **{figures.wrong} wrong**" if figures.wrong else times

    return tell


def _ratio(name: str) -> Callable[[Result], str]:
    def tell(result: Result) -> str:
        if name not in result.figures:
            return ABSENT
        return _told(result.figures[_GLOO].median / result.figures[name].median)

    return tell


def _cpu_ratio(result: Result) -> str:
    """Return Gloo's CPU time of an op in units of Allfold's, of all ranks and agents."""
    ours = result.figures[OURS].cpu
    return _told(result.figures[_GLOO].cpu / ours) if ours else ABSENT


def _told(ratio: float) -> str:
    """Return a ratio, bold where it is below 1; what is just below is not rounded up to it."""
    return f"{ratio:.3g}" if ratio >= 1 else f"**{min(ratio, 0.99):.2g}**"


def _speed_table(found: Measured, keys: Sequence[Key]) -> str:
    names = found.libraries(keys)
    rows = [["nodes × ranks", *names], ["---", *["--:"] * len(names)]]
    rows += [
        [str(key.shape), *(found.cell(key, name, _tokens(name)) for name in names)] for key in keys
    ]
    return lines(rows) if keys else ""


def _tokens(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result.tokens_per_second(name):.1f} ({_times(name)(result)})"


def _behind(found: Measured) -> str:
    """Return every ratio below 1 of any run, to any other library."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for key in found.keys:
        rhythm = key.mode.rhythm if key.case.kind in KINDS else ""
        for name in OTHERS:
            ratios = [_behind_by(result, name) for result in found.results(key)]
            if any(ratio is not None and ratio < 1 for ratio in ratios):
                where = (name, key.case.kind, rhythm, key.network, str(key.shape))
                told = ", ".join(ABSENT if ratio is None else _told(ratio) for ratio in ratios)
                rows.setdefault(where, []).append(f"{_size(key)} {told}".strip())
    if not found.keys:
        return ""
    head = ["ahead of Allfold", "op", "rhythm", "network", "nodes × ranks", "at, by"]
    some = [[*where, "; ".join(cases)] for where, cases in sorted(rows.items(), key=_peer)]
    return lines([head, ["---"] * len(head), *some]) if rows else _NEVER


def _behind_by(result: Result | None, name: str) -> float | None:
    return result.ratio(name) if result and name in result.figures else None


def _size(key: Key) -> str:
    has_size = key.case.size and key.case.kind != DECODE
    return f"{human_size(key.case.size)}:" if has_size else ""


def _peer(row: tuple[tuple[str, ...], list[str]]) -> int:
    return OTHERS.index(row[0][0])
