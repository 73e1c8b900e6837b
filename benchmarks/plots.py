"""Latency and bus bandwidth against size, a line per library, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plan import BARRIER, BURST, DDP, DECODE, Shape, human_size
from benchmarks.results import Report, Result
from benchmarks.scale import plots as scale_plots
from benchmarks.svg import STYLE, save

_SIZE = (9.0, 4.0)
COLOURS = {
    "allfold": "C0",
    "plain": "C9",
    "allfold-torch": "C6",
    "gloo": "C1",
    "mpich": "C2",
    "openmpi": "C8",
    "ucx": "C7",
    "nccl": "C3",
    "gloo_host": "C4",
    "deepspeed": "C5",
}


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw curves over sizes and what was found of thousands of nodes; the files' paths."""
    return [*_draw_collectives(report.results, folder), *scale_plots.draw(report.scale, folder)]


def _draw_collectives(results: Sequence[Result], folder: Path) -> list[Path]:
    """One file for each network, shape and collective that has several sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(STYLE):
        for (network, shape, title), found in groupby(sorted(_curves(results), key=_key), _key):
            points = sorted(found, key=lambda result: result.case.size)
            if len(points) > 1:
                drawn.append(_draw(points, folder / _name(network, shape, title)))
    return drawn


def _name(network: str, shape: Shape, title: str) -> str:
    return f"{network}-{shape}-{title.replace(' ', '-')}.svg"


def _curves(results: Iterable[Result]) -> list[Result]:
    return [each for each in results if each.case.kind not in (BARRIER, BURST, DDP, DECODE)]


def _key(result: Result) -> tuple[str, Shape, str]:
    return result.network, result.shape, result.case.title


def _draw(points: Sequence[Result], path: Path) -> Path:
    figure = Figure(figsize=_SIZE, layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    for name in dict.fromkeys(name for point in points for name in point.figures):
        with_it = [point for point in points if name in point.figures]
        sizes = [point.case.size for point in with_it]
        style = {"label": name, "color": COLOURS.get(name), "marker": ".", "linewidth": 1.2}
        latency.plot(sizes, [point.figures[name].median for point in with_it], **style)
        bandwidth.plot(sizes, [point.busbw(name) for point in with_it], **style)
    if points[0].line:
        bandwidth.axhline(points[0].line / 1e9, color="grey", linestyle=":", label="the line")
    _axes(latency, points, "time of an op, s")
    _axes(bandwidth, points, "bus bandwidth, GB/s")
    latency.legend(frameon=False)
    network, shape, title = _key(points[0])
    figure.suptitle(f"{title}, {shape} nodes x ranks, {network}")
    return save(figure, path)


def _axes(axes: Axes, points: Sequence[Result], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = [point.case.size for point in points]
    shown = sizes[:: max(1, len(sizes) // 6)]
    axes.set_xticks(shown, [human_size(size) for size in shown], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylabel(what)
    axes.grid(visible=True, alpha=0.3)
