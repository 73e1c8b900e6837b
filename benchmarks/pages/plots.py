"""Latency over size: a panel per shape, a line per library with its p99 above it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pages.page import has_curve
from benchmarks.pages.selection import Measured, Mode, by_mode
from benchmarks.plan import human_size
from benchmarks.plots import COLOURS
from benchmarks.results import Result
from benchmarks.svg import STYLE, save

_COLUMNS = 3
_PANEL = (3.6, 2.9)
_SHOWN_SIZES = 4


def draw(measured: Measured, images: Path) -> list[Path]:
    """One file of all-reduces for each network and what comes before each op; their paths."""
    images.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        return [
            _draw([measured.newest(key) for key in keys], mode, images / mode.file_name)
            for mode, keys in by_mode(measured.of_kinds("all_reduce")).items()
            if has_curve(keys)
        ]


def _draw(results: Sequence[Result], mode: Mode, path: Path) -> Path:
    shapes = [list(some) for _, some in groupby(results, lambda each: each.shape)]
    # One panel more, for the legend.
    columns = min(_COLUMNS, len(shapes) + 1)
    rows = -(-(len(shapes) + 1) // columns)
    size = (columns * _PANEL[0], rows * _PANEL[1])
    figure = Figure(figsize=size, layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    names = list(dict.fromkeys(name for each in results for name in each.figures))
    for panel, found in zip(axes, shapes, strict=False):
        _panel(panel, found, names)
    for empty in axes[len(shapes) :]:
        empty.set_axis_off()
    handles: Any = axes[0].get_legend_handles_labels()
    axes[-1].legend(*handles, loc="center", frameon=False, title="p50; dotted: p99")
    figure.suptitle(f"All-reduce {mode.rhythm}, {results[0].place}")
    return save(figure, path)


def _panel(axes: Axes, results: Sequence[Result], names: Sequence[str]) -> None:
    for name in names:
        with_it = [each for each in results if name in each.figures]
        sizes = [each.case.size for each in with_it]
        colour: Any = COLOURS.get(name)
        style: Any = {"color": colour, "linewidth": 1.4, "marker": ".", "label": name}
        axes.plot(sizes, [each.figures[name].median * 1e6 for each in with_it], **style)
        style = {"color": colour, "linewidth": 0.8, "linestyle": ":"}
        axes.plot(sizes, [each.figures[name].p99 * 1e6 for each in with_it], **style)
    axes.set_title(f"nodes × ranks: {results[0].shape}", fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [each.case.size for each in results]
    shown = sizes[:: -(-len(sizes) // _SHOWN_SIZES)]
    axes.set_xticks(shown, [human_size(size) for size in shown])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_tick_params(labelleft=True)
    axes.set_ylabel("µs")
    axes.grid(visible=True, alpha=0.3)
