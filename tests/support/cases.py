"""Cases of collectives and what must come out, computed without Allfold.

The inputs are small integers, such that every value on the way is exact in every element type, in
whatever order it is folded; a mean is one division and one rounding of such a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64]
Bytes = bytes

_FOLDS: dict[str, Callable[[Values, Values], Values]] = {
    "sum": np.add,
    "mean": np.add,
    "product": np.multiply,
    "premul_sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_UNSIGNED = ("uint8", "bool")


@dataclass(frozen=True)
class Case:
    """One call, as it crosses the pipe to a worker: ``Case(*row)``."""

    op: str
    dtype: str
    numel: int
    strategy: str

    @property
    def row(self) -> list[Any]:
        return list(astuple(self))


def inputs(op: str, dtype: str, numel: int, rank: int) -> Values:
    """Return the input of ``rank``."""
    index = np.arange(numel, dtype=np.int64)
    if dtype == "bool":
        return (index * 3 + rank) % 4 % 2
    if op == "product":
        choice = np.array([1, 2, 1 if dtype in _UNSIGNED else -1])
        return choice[(index + 2 * rank) % 3]
    values = (index * 7 + rank * 13) % 17
    return values if dtype in _UNSIGNED else values - 8


@lru_cache(maxsize=4096)
def expected(op: str, dtype: str, numel: int, world_size: int) -> Bytes:
    """The bytes of the result on every rank."""
    brought = [inputs(op, dtype, numel, rank) for rank in range(world_size)]
    return fold(op, dtype, brought)


def fold(op: str, dtype: str, brought: Sequence[Values], factor: float = 1.0) -> Bytes:
    """The bytes of the fold of what ranks bring, one after the other."""
    wide = "float64" if dtype == "float64" else "float32"
    operands: Sequence[Any] = brought
    if op == "premul_sum":
        operands = [values.astype(wide) * np.array(factor, wide) for values in brought]
    total = operands[0]
    for values in operands[1:]:
        total = _FOLDS[op](total, values)
    if op == "mean":
        return encode(total.astype(wide) / np.array(len(brought), wide), dtype)
    return encode(total, dtype)


def encode(values: npt.NDArray[Any], dtype: str) -> Bytes:
    """The bytes of numbers in an element type, rounded to nearest even."""
    if dtype == "bfloat16":
        return bfloat16_bits(values.astype(np.float32)).tobytes()
    if dtype == "bool":
        return values.astype(np.bool_).tobytes()
    data: Bytes = values.astype(dtype).tobytes()
    return data


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))
    return (rounded >> np.uint64(16)).astype(np.uint16)


def digest(data: Bytes | memoryview) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def numels(world_size: int, nodes: int) -> list[int]:
    """Sizes around which ranges could be cut wrongly, and one that is not a round number."""
    around = {count + step for count in (world_size, nodes) for step in (-1, 0, 1, 2)}
    return sorted({0, 1, 1000} | around)


def label(rows: Sequence[Any]) -> str:
    return "/".join(map(str, rows))
