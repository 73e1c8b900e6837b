"""The inputs of the ranks, and the right results: random numbers that float32 reduces exactly."""

from __future__ import annotations

import numpy as np

from allfold.cli._bench.data import Array, Share
from benchmarks.plan import DECODE

LARGEST = 1000
_SEED = 20_260
# Half a unit in the last place; of int8 half a step of 1/127.
_ROUNDING = {"native": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}
_FLOAT32 = 2.0**-24


class RandomShare(Share):
    """One rank's share in a case. The numbers are whole, between -1000 and 1000."""

    def brought_by(self, rank: int, count: int) -> Array:
        dice = np.random.default_rng([_SEED, self.world, rank])
        drawn = dice.integers(-LARGEST, LARGEST, count, dtype=np.int16, endpoint=True)
        return drawn.astype(self.bench.dtype)

    def folded(self) -> Array:
        """The sum of what all ranks bring, exact."""
        total = self.brought_by(0, self.count)
        for rank in range(1, self.world):
            total += self.brought_by(rank, self.count)
        return total

    def growth(self, ops: int) -> float:
        """Return the last result over the first one, of so many all-reduces in place."""
        grows = self.bench.kind in ("all_reduce", DECODE)
        return float(self.world) ** (ops - 1) if grows else 1.0

    def tolerance(self, nodes: int, ops: int, wire: str) -> float:
        """The most by which an element may be wrong after so many ops; 0 where all is exact.

        A lossy wire rounds once per node that a value passes, and once for the result. Sums of
        worlds that are no power of 2 lose exactness as they are summed again.
        """
        relative = _ROUNDING[wire] * (nodes + 1)
        if ops > 1 and self.world & (self.world - 1):
            relative += _FLOAT32 * self.world
        return relative * ops * self.growth(ops) * LARGEST * self.world


def count_wrong(result: Array, expected: Array, growth: float, tolerance: float) -> int:
    """Elements that are further from ``growth * expected`` than they may be; NaN is wrong."""
    truth = expected * np.float32(growth)
    if not tolerance:
        return int(np.count_nonzero(result != truth))
    return int(np.count_nonzero(~(np.abs(result - truth) <= tolerance)))
