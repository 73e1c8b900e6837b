"""The results of the parts as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plan import human_size
from benchmarks.svg import STYLE, save

_SHOWN_NODES = (16, 256, 10_000)
_SHOWN_SIZES = (4096, 4 << 16, 4 << 24)
# They differ from another one by a constant factor.
_LEFT_OUT = ("chain", "tree(4)")


def draw(results: Mapping[str, dict[str, Any]], images: Path) -> list[Path]:
    """Draw the results of the parts; the paths of the plots."""
    images.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    with mpl.rc_context(STYLE):
        for part, plot in (("orchestrator", _control), ("predictions", _collectives)):
            if part in results:
                drawn += plot(results[part], images)
    return drawn


def _control(result: dict[str, Any], images: Path) -> Iterator[Path]:
    """CPU time of a phase, and how long one request took."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    work, times = figure.subplots(1, 2)
    names = list(result["phases"])[::-1]
    phases = [result["phases"][name] for name in names]
    labels = [f"{n} ({p['requests']})" for n, p in zip(names, phases, strict=True)]
    ours = [phase["orchestrator_cpu_seconds"] for phase in phases]
    work.barh(labels, ours, color="C0", label="orchestrator")
    work.barh(
        labels, [p["redis_cpu_seconds"] for p in phases], left=ours, color="C1", label="Redis"
    )
    work.set_xlabel("CPU seconds")
    work.legend(frameon=False)
    times.barh(labels, [p["p99_seconds"] for p in phases], color="C7", label="99th percentile")
    times.barh(labels, [p["median_seconds"] for p in phases], color="C0", label="median")
    times.set_xlabel("seconds until the answer")
    times.set_xscale("log")
    times.set_yticks([])
    times.legend(frameon=False)
    figure.suptitle(
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks, "
        f"{result['replicas']} orchestrator(s), one Redis"
    )
    yield save(figure, images / "scale-control.svg")


def _collectives(result: dict[str, Any], images: Path) -> Iterator[Path]:
    rows = result["predictions"]
    for number, links in enumerate(dict.fromkeys(row["links"] for row in rows), 1):
        of_links = [row for row in rows if row["links"] == links]
        figure = Figure(figsize=(9.0, 6.4), layout="constrained")
        panels = figure.subplots(2, 3, sharey="row")
        for axes, nodes in zip(panels[0], _SHOWN_NODES, strict=True):
            _curves(axes, [row for row in of_links if row["nodes"] == nodes], "bytes")
            axes.set_title(f"{nodes} nodes")
            axes.set_xlabel("bytes")
        for axes, size in zip(panels[1], _SHOWN_SIZES, strict=True):
            _curves(axes, [row for row in of_links if row["bytes"] == size], "nodes")
            axes.set_title(human_size(size))
            axes.set_xlabel("nodes")
        for axes in panels[:, 0]:
            axes.set_ylabel("predicted seconds")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(f"all-reduce by the cost model, {links}")
        yield save(figure, images / f"scale-all-reduce-{number}.svg")


def _curves(axes: Axes, rows: Sequence[dict[str, Any]], along: str) -> None:
    shown = dict.fromkeys(row["strategy"] for row in rows)
    for number, strategy in enumerate(name for name in shown if name not in _LEFT_OUT):
        points = [row for row in rows if row["strategy"] == strategy]
        axes.plot(
            [row[along] for row in points],
            [row["seconds"] for row in points],
            label=strategy,
            color=f"C{number}",
            linewidth=1.2,
        )
    axes.set_xscale("log", base=2 if along == "bytes" else 10)
    axes.set_yscale("log")
    axes.set_ylim(1e-5, 1e3)
    axes.grid(visible=True, alpha=0.3)
