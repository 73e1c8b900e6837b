"""Predictions of all-reduces over thousands of nodes, by the cost model that ``auto`` uses.

Closed forms for any number of nodes; and where a schedule is small enough to be compiled and
run on a simulated clock, that time too, which knows nothing of the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from allfold_core.operations import Kind
from allfold_core.pricing.predict import closed_form
from allfold_core.pricing.price import price
from allfold_core.schedules.compiler import compile_program, compile_schedule
from allfold_core.schedules.registry import candidates
from allfold_core.topology import LinkModel

KIND = Kind.ALL_REDUCE
NODES = (4, 16, 64, 256, 1_000, 4_096, 10_000)
SIZES = tuple(4 << shift for shift in range(0, 29, 2))
ITEMSIZE = 4
MAX_SIMULATED_STEPS = 60_000

# A process's message over an ordinary network, and two kinds of link; the first is the default
# of the orchestrator. Folding runs at 5 GB/s throughout.
LINKS = {
    "10 Gbit/s, 150 us": LinkModel(),
    "100 Gbit/s, 30 us": LinkModel(30e-6, 8e-6, 1 / 11e9),
}


def measure() -> dict[str, Any]:
    """Predictions for every strategy, size and number of nodes, and how the simulation agrees."""
    begun = perf_counter()
    rows = [row for name, links in LINKS.items() for row in _predictions(name, links)]
    seconds = perf_counter() - begun
    return {
        "predictions": rows,
        "seconds_per_prediction": seconds / len(rows),
        "simulated": list(_comparisons()),
    }


def _predictions(name: str, links: LinkModel) -> Iterator[dict[str, Any]]:
    for strategy in candidates(KIND):
        for nodes in NODES:
            for size in SIZES:
                seconds = closed_form(KIND, strategy, nodes, size, links)
                yield _row(name, strategy, nodes, size, seconds)


def _row(links: str, strategy: str, nodes: int, size: int, seconds: float) -> dict[str, Any]:
    return {
        "links": links,
        "strategy": strategy,
        "nodes": nodes,
        "bytes": size,
        "seconds": seconds,
    }


def _comparisons() -> Iterator[dict[str, Any]]:
    """Formula against simulation, unpipelined, where the simulation takes seconds at most."""
    name, links = next(iter(LINKS.items()))
    for strategy in candidates(KIND):
        for nodes in NODES:
            if about_steps(strategy, nodes) > MAX_SIMULATED_STEPS:
                continue
            for size in (4 * 1024 * nodes, 1 << 26):
                schedule = compile_schedule(KIND, strategy, nodes=nodes, numel=size // ITEMSIZE)
                row = _row(
                    name, strategy, nodes, size, closed_form(KIND, strategy, nodes, size, links, 1)
                )
                yield row | {"simulated": price(schedule, links, ITEMSIZE)}


def about_steps(strategy: str, nodes: int) -> int:
    """About how many steps all programs have together: four per level, or more where a node in the
    middle has more, as in a ring. That of a root can be far longer, but there is only one."""
    middle = compile_program(KIND, strategy, nodes=nodes, numel=nodes, node=nodes // 2)
    return nodes * max(len(middle), 4 * nodes.bit_length())
