"""The inputs of the ranks, and the right results: random numbers that float32 reduces exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from allfold.cli._bench.data import Array, Share
from allfold_core.dtypes import Wire

LARGEST = 1000
_SEED = 20_260


@dataclass(frozen=True)
class RandomShare(Share):
    """One rank's share in a case. The numbers are whole, between -1000 and 1000.

    Attributes:
        variant: ops of different variants have different numbers.
    """

    variant: int = 0

    def brought_by(self, rank: int, count: int) -> Array:
        dice = np.random.default_rng([_SEED, self.world, rank, self.variant])
        drawn = dice.integers(-LARGEST, LARGEST, count, dtype=np.int16, endpoint=True)
        return drawn.astype(self.bench.dtype)

    def folded(self) -> Array:
        """The sum of what all ranks bring, exact."""
        total = self.brought_by(0, self.count)
        for rank in range(1, self.world):
            total += self.brought_by(rank, self.count)
        return total

    def tolerance(self, nodes: int, wire: str) -> float:
        """The most by which an element may be wrong; 0 where all is exact.

        A lossy wire rounds once per node that a value passes, and once for the result.
        """
        return Wire.from_label(wire).rounding * (nodes + 1) * LARGEST * self.world


def count_wrong(result: Array, truth: Array, tolerance: float) -> int:
    """Elements that are further from the truth than they may be; NaN is wrong."""
    if not tolerance:
        return int(np.count_nonzero(result != truth))
    return int(np.count_nonzero(~(np.abs(result - truth) <= tolerance)))
