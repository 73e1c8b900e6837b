"""The right results of every collective, computed block by block without Allfold.

What is folded are the small integers of :mod:`tests.support.cases`; what is only moved are random
bits, whatever they mean in the element type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from tests.support import cases
from tests.support.cases import Bytes

PLAIN = ("all_reduce", "reduce", "broadcast")
BLOCKED = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
FOLDED = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")

_PARTS = {"complex64": "float32", "complex128": "float64"}
_TORCH_ONLY = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Collective:
    """One call, as it crosses the pipe to a worker: ``Collective(**row)``.

    Attributes:
        rows: of every rank's block; of an all-to-all, of every pair's, by source and then by
            destination; of other kinds, of every tensor of the list that they get.
        row: the shape of a row.
        form: ``tensor``; ``list``; ``stacked``, where the whole has a dimension for the ranks; or
            ``new``, where the result is not given.
        counts: say them also where all blocks are equal.
        place: ``plain``, ``arena`` or ``strided``.
    """

    kind: str
    rows: Sequence[int]
    row: Sequence[int] = ()
    dtype: str = "float32"
    root: int = 0
    op: str = "sum"
    factor: float = 0.5
    strategy: str = "auto"
    form: str = "tensor"
    counts: bool = False
    torch: bool = False
    place: str = "plain"

    @property
    def message(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def folds(self) -> bool:
        return self.kind in FOLDED

    def rows_from(self, rank: int, world_size: int) -> Sequence[int]:
        """Of an all-to-all: the rows that a rank sends to each."""
        return self.rows[rank * world_size : (rank + 1) * world_size]

    def rows_to(self, rank: int, world_size: int) -> Sequence[int]:
        """Of an all-to-all: the rows that a rank gets from each."""
        return self.rows[rank::world_size]

    def nbytes(self, rows: int) -> int:
        return rows * prod(self.row) * itemsize(self.dtype)

    def split(self, data: Bytes, rows: Sequence[int]) -> list[Bytes]:
        """Blocks of so many rows that lie one after the other."""
        ends = accumulate((self.nbytes(count) for count in rows), initial=0)
        return [data[start:stop] for start, stop in pairwise(ends)]


def itemsize(dtype: str) -> int:
    return _TORCH_ONLY.get(dtype) or np.dtype(dtype).itemsize


def brought(case: Collective, rank: int, world_size: int) -> Bytes:
    """All that a rank brings, its blocks one after the other."""
    match case.kind:
        case "broadcast" | "scatter":
            rows = sum(case.rows) if rank == case.root else 0
        case "all_gather" | "gather":
            rows = case.rows[rank]
        case "all_to_all":
            rows = sum(case.rows_from(rank, world_size))
        case _:
            rows = sum(case.rows)
    if case.folds:
        return cases.encode(_numbers(case, rows, rank), _part(case.dtype))
    return _random_bits(case.dtype, case.nbytes(rows), rank)


def results(case: Collective, world_size: int) -> list[Bytes]:
    """Return the right result of every rank; nothing where it gets nothing."""
    given = [brought(case, rank, world_size) for rank in range(world_size)]
    match case.kind:
        case "all_reduce":
            return [_folded(case, world_size)] * world_size
        case "reduce":
            return [*given[: case.root], _folded(case, world_size), *given[case.root + 1 :]]
        case "broadcast":
            return [given[case.root]] * world_size
        case "all_gather":
            return [b"".join(given)] * world_size
        case "gather":
            return [b"".join(given) if rank == case.root else b"" for rank in range(world_size)]
        case "scatter":
            return case.split(given[case.root], case.rows)
        case "reduce_scatter":
            return case.split(_folded(case, world_size), case.rows)
    sent = [case.split(data, case.rows_from(rank, world_size)) for rank, data in enumerate(given)]
    return [b"".join(blocks[rank] for blocks in sent) for rank in range(world_size)]


def _folded(case: Collective, world_size: int) -> Bytes:
    numbers = [_numbers(case, sum(case.rows), rank) for rank in range(world_size)]
    return cases.fold(case.op, _part(case.dtype), numbers, case.factor)


def _numbers(case: Collective, rows: int, rank: int) -> cases.Values:
    dtype = _part(case.dtype)
    return cases.inputs(case.op, dtype, case.nbytes(rows) // itemsize(dtype), rank)


def _part(dtype: str) -> str:
    """The type of the real and the imaginary part, which are folded apart."""
    return _PARTS.get(dtype, dtype)


def _random_bits(dtype: str, nbytes: int, rank: int) -> Bytes:
    data = np.random.default_rng([nbytes, rank]).integers(0, 256, nbytes, np.uint8)
    return (data & 1 if dtype == "bool" else data).tobytes()
