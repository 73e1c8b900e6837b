"""The statistics of one case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Figures:
    """The ops of one library, each with the time of its slowest rank.

    Attributes:
        median, mean, p99, least: seconds per op.
        samples: how many ops there were.
        wrong: elements that were wrong, over all ops that were checked and all ranks.
        cpu: CPU-seconds per op, of all ranks and agents together.
    """

    median: float
    mean: float
    p99: float
    least: float
    samples: int
    wrong: int
    cpu: float

    @classmethod
    def of(cls, seconds: Sequence[float], wrong: int, cpu: float) -> Self:
        return cls(
            statistics.median(seconds),
            statistics.fmean(seconds),
            percentile(seconds, 99),
            min(seconds),
            len(seconds),
            wrong,
            cpu,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
