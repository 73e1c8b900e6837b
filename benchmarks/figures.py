"""What is said of the samples of one case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Figures:
    """The samples of one library, each that of the slowest rank.

    Attributes:
        median, least, p90: seconds per op.
        samples: how many there were.
        wrong: elements that were wrong, over all samples and ranks.
        cpu: CPU-seconds per op, of all ranks and agents together.
    """

    median: float
    least: float
    p90: float
    samples: int
    wrong: int
    cpu: float

    @classmethod
    def of(cls, seconds: Sequence[float], wrong: int, cpu: float) -> Self:
        return cls(
            statistics.median(seconds),
            min(seconds),
            percentile(seconds, 90),
            len(seconds),
            wrong,
            cpu,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
