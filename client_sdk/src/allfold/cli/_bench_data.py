"""The numbers of ``allfold bench``: what ranks bring, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from allfold._options import Options

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
        return values(self.bench, rank, count).astype(self.bench.dtype)

    def gathered(self) -> Array:
        """One block of each rank."""
        return np.concatenate([self.brought_by(rank, self.block) for rank in range(self.world)])

    def exchanged(self) -> Array:
        """What each rank has for this one."""
        everything = (self.brought_by(rank, self.count) for rank in range(self.world))
        return np.concatenate([self.own(each) for each in everything])

    def folded(self) -> Array:
        """The reduction of what all ranks bring, in sequence."""
        op, dtype = self.bench.op, self.bench.dtype
        total = values(self.bench, 0, self.count)
        for rank in range(1, self.world):
            total = _FOLDS[op](total, values(self.bench, rank, self.count))
        if op == "mean":
            wide = "float64" if dtype == "float64" else "float32"
            mean: Array = np.divide(total.astype(wide), np.array(self.world, wide))
            return mean.astype(dtype)
        return total.astype(dtype)


def values(bench: Bench, rank: int, count: int) -> Array:
    """What a rank brings: integers that every type folds exactly, on any number of ranks."""
    index = np.arange(count, dtype=np.int64)
    if bench.op == "product":
        return 1 + (index + rank) % (64 if rank == 0 else 1)
    return (index * 7 + rank * 3) % 4
