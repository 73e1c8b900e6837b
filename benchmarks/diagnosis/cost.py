"""The cost of the observer: all-reduces of two groups in turn, one of them observed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.diagnosis.cost_cluster import CostCluster

_SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
_BLOCK_SECONDS = 0.5


@dataclass(frozen=True)
class Cost:
    """The seconds of single all-reduces, without and with the observer.

    Attributes:
        off, on: p50, p99 and mean.
        cost: by how much the median of blocks of one is above that of the other, in turn.
    """

    shape: str
    size: str
    off: tuple[float, float, float]
    on: tuple[float, float, float]
    cost: float

    def line(self) -> str:
        """One line of the table."""
        (off, *off_more), (on, *on_more) = self.off, self.on
        more = " / ".join(f"{each * 1e6:.1f}" for each in (*off_more, *on_more))
        return (
            f"{self.shape + ' ' + self.size:<22}{off * 1e6:>10.1f}{on * 1e6:>10.1f}"
            f"{self.cost:>8.2%}   {more}"
        )


def measure_cost(seconds: float) -> list[Cost]:
    """Measure every size for so many seconds on one node and between two."""
    found = []
    for shape, nodes, per_node in (("1x2", 1, 2), ("2x1", 2, 1)):
        with CostCluster(nodes, per_node) as cluster:
            for size, nbytes in _SIZES.items():
                pairs = [
                    cluster.time_both(nbytes, _BLOCK_SECONDS)
                    for _ in range(max(4, int(seconds / (2 * _BLOCK_SECONDS))))
                ]
                off = sorted(time for pair in pairs for time in pair[0])
                on = sorted(time for pair in pairs for time in pair[1])
                ratios = [statistics.median(pair[1]) / statistics.median(pair[0]) for pair in pairs]
                found.append(
                    Cost(shape, size, _figures(off), _figures(on), statistics.median(ratios) - 1)
                )
    return found


def _figures(times: list[float]) -> tuple[float, float, float]:
    late = times[min(len(times) - 1, int(0.99 * len(times)))]
    return statistics.median(times), late, statistics.fmean(times)
