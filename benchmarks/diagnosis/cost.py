"""The cost of the observer: all-reduces of two groups in turn, one of them observed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.diagnosis.cost_cluster import ORDERS, CostCluster, Pair

_SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
_BLOCK_SECONDS = 0.5
# Where its processes and their memory lie makes a group faster or slower than the next one for as
# long as it lives, by more than the observer costs: so there are some of each.
_MOST_CLUSTERS = 8
_SECONDS_OF_A_CLUSTER = 7.5


@dataclass(frozen=True)
class Cost:
    """The seconds of single all-reduces, without and with the observer.

    Attributes:
        off, on: p50, p99 and mean.
        costs: of each pair of groups, by how much the median of blocks of one is above that of the
            other, in turn.
    """

    shape: str
    size: str
    off: tuple[float, float, float]
    on: tuple[float, float, float]
    costs: list[float]

    def line(self) -> str:
        """One line of the table."""
        (off, *off_more), (on, *on_more) = self.off, self.on
        more = " / ".join(f"{each * 1e6:.1f}" for each in (*off_more, *on_more))
        spread = f"{min(self.costs):.1%} to {max(self.costs):.1%}"
        return (
            f"{self.shape + ' ' + self.size:<22}{off * 1e6:>10.1f}{on * 1e6:>10.1f}"
            f"{statistics.median(self.costs):>8.2%}   {spread:<18}{more}"
        )


def measure_cost(seconds: float) -> list[Cost]:
    """Measure every size for so many seconds on one node and between two."""
    return [
        cost
        for shape, nodes, per_node in (("1x2", 1, 2), ("2x1", 2, 1))
        for cost in _costs_of(shape, nodes, per_node, seconds)
    ]


def _costs_of(shape: str, nodes: int, per_node: int, seconds: float) -> list[Cost]:
    times: dict[str, list[Pair]] = {size: [] for size in _SIZES}
    costs: dict[str, list[float]] = {size: [] for size in _SIZES}
    clusters = max(1, min(_MOST_CLUSTERS, int(seconds / _SECONDS_OF_A_CLUSTER)))
    turns = max(1, int(seconds / (2 * _BLOCK_SECONDS * clusters)))
    for number in range(clusters):
        with CostCluster(nodes, per_node, ORDERS[number % 2]) as cluster:
            for size, nbytes in _SIZES.items():
                pairs = [
                    cluster.time_both(nbytes, _BLOCK_SECONDS, ORDERS[turn % 2])
                    for turn in range(turns)
                ]
                ratios = [statistics.median(on) / statistics.median(off) for off, on in pairs]
                costs[size].append(statistics.median(ratios) - 1)
                times[size] += pairs
    return [
        Cost(
            shape,
            size,
            _figures(sorted(time for off, _ in times[size] for time in off)),
            _figures(sorted(time for _, on in times[size] for time in on)),
            costs[size],
        )
        for size in _SIZES
    ]


def _figures(times: list[float]) -> tuple[float, float, float]:
    late = times[min(len(times) - 1, int(0.99 * len(times)))]
    return statistics.median(times), late, statistics.fmean(times)
