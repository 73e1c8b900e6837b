"""The statistics of one case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Figures:
    """The ops of one library, each from the last rank's call to the last rank's return.

    Attributes:
        median, mean, p99, least: seconds of single ops.
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


def op_seconds(calls: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of each op: from the last rank's call to the last rank's return.

    A rank that calls late makes the others wait, which is not the library's time.

    Args:
        calls: by rank, and by op: when it called, on a clock that all ranks share.
        returns: likewise, when the call returned.
    """
    ends, begins = ([max(each) for each in zip(*ranks, strict=True)] for ranks in (returns, calls))
    return [end - begin for end, begin in zip(ends, begins, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
