"""The numbers of ``allfold bench``: the ranks' inputs, and the exact results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from allfold._calls.options import Options

DTYPES = (
    *("float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8"),
)

Array = np.ndarray[Any, Any]

_FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPS = tuple(_FOLDS)

# What everybody brings repeats itself after so many elements per rank. A prime: what a strategy
# moves at a time is no multiple of it, so that data at another's place does not look right.
_PERIOD = 1009
_MARKS = range(2, 64)
# Data that is only moved; a prime, see _moved().
_MOVED = 97
# What ranks bring beside a mark: no result of an op is this where it should be a mark.
_UNMARKED = {"min": _MARKS.stop, "band": 127}
_USUALLY_UNMARKED = 1


@dataclass(frozen=True)
class Bench:
    """One line of the table.

    Attributes:
        op: ``"-"`` where nothing is reduced.
        count: elements that ``size`` stands for; a multiple of the world size where the tensor
            consists of blocks.
    """

    kind: str
    op: str
    dtype: str
    count: int
    options: Options

    @property
    def size(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Share:
    """One rank's share in a line."""

    bench: Bench
    rank: int
    world: int

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def count(self) -> int:
        return self.bench.count

    @property
    def block(self) -> int:
        return self.bench.count // self.world

    def own(self, whole: Array) -> Array:
        """This rank's block."""
        return whole[self.rank * self.block : (self.rank + 1) * self.block]

    def brought_by(self, rank: int, count: int) -> Array:
        return np.resize(values(self.bench.op, rank, self.world).astype(self.bench.dtype), count)

    def gathered(self) -> Array:
        """One block of each rank."""
        return np.concatenate([self.brought_by(rank, self.block) for rank in range(self.world)])

    def exchanged(self) -> Array:
        """Return the blocks that all ranks have for this one."""
        everything = (self.brought_by(rank, self.count) for rank in range(self.world))
        return np.concatenate([self.own(each) for each in everything])

    def folded(self) -> Array:
        """The reduction of what all ranks bring."""
        return np.resize(self._period_folded().astype(self.bench.dtype), self.count)

    @property
    def greatest(self) -> float:
        """No magnitude that travels is above this, be it of a partial result.

        (The sums of a mean are, but what rounding costs them is divided as they are.)
        """
        if self.bench.op == "-":
            return _MOVED
        if self.bench.op == "min":
            return _UNMARKED["min"]
        return float(self._period_folded().max())

    def _period_folded(self) -> Array:
        op = self.bench.op
        total = fold(op, (values(op, rank, self.world) for rank in range(self.world)))
        if op == "mean":
            wide = "float64" if self.bench.dtype == "float64" else "float32"
            total = np.divide(total.astype(wide), np.array(self.world, wide))
        return total


def fold(op: str, contributions: Iterable[Array]) -> Array:
    """Reduce contributions in sequence; for a mean, return the sum."""
    folded: Array = reduce(_FOLDS[op], contributions)
    return folded


def values(op: str, rank: int, world: int) -> Array:
    """Return a rank's input, one period of it: integers that every type reduces exactly.

    Every element is marked by one rank, and each row of as many elements as there are ranks has a
    mark of every rank: so a contribution that is lost, or there twice, or at another's place shows
    in the result. (But to min, max, band and bor twice is as good as once.)
    """
    owners, drawn = _drawn(world)
    if op == "-":
        return _moved(rank, drawn)
    marked = owners == rank
    if op == "product":
        # Two marks of different ranks in one element could be more than an int8 or a float16
        # holds, so every mark is 2, and rank 0 alone makes a difference between elements.
        factor = 1 + drawn % 63 if rank == 0 else 1
        return np.where(marked, 2, 1) * factor
    marks = _MARKS.start + drawn % len(_MARKS)
    return np.where(marked, marks, _UNMARKED.get(op, _USUALLY_UNMARKED))


def _moved(rank: int, drawn: Array) -> Array:
    """Different from what any of the next ranks brings, in every element.

    Ranks further away have another sequence altogether.
    """
    return 1 + (drawn * (1 + rank // _MOVED) + rank) % _MOVED


@lru_cache(maxsize=1)
def _drawn(world: int) -> tuple[Array, Array]:
    """Per element: the rank that marks it, and a number below 2^16."""
    # This generator gives the same numbers in every version of NumPy, so on every machine.
    dice = np.random.RandomState(world)
    owners = np.argsort(dice.random_sample((_PERIOD, world)), axis=1, kind="stable")
    return owners.reshape(-1), dice.randint(1 << 16, size=owners.size).astype(np.int64)
