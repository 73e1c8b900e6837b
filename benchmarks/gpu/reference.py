"""What ranks bring and what must come out, by NumPy alone. All numbers are exact in every dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.gpu.plan import Call

Array = np.ndarray[Any, Any]

FACTOR = 0.5
"""Of a premultiplied sum."""

_BITS = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_ALL = ("product", "min", "band")
_ANY = ("sum", "max", "bor")


def given(call: Call, rank: int, world: int) -> Array:
    """All that a rank brings, its blocks one after the other; int64 or complex128."""
    dice = np.random.default_rng([crc32(repr(call).encode()), rank])
    count = _brings(call, rank, world)
    if call.dtype.startswith("complex"):
        real, imaginary = (world * dice.integers(-9, 10, count) for _ in range(2))
        return np.asarray(real + 1j * imaginary)
    if call.dtype == "bool":
        return dice.integers(0, 2, count)
    low, high = _range(call)
    drawn = dice.integers(low, high, count, endpoint=True)
    if call.op == "product":
        return np.where(drawn == 0, 1, drawn)
    return drawn * (world if call.op == "mean" else 2 if call.op == "premul_sum" else 1)


def expected(call: Call, rank: int, world: int) -> Array | None:
    """What a rank has in the end; ``None`` where it gets nothing and keeps nothing."""
    everybody = [given(call, each, world) for each in range(world)]
    match call.kind:
        case "all_reduce":
            return folded(call, everybody)
        case "reduce":
            return folded(call, everybody) if rank == call.root else everybody[rank]
        case "broadcast":
            return everybody[call.root]
        case "all_gather":
            return np.concatenate(everybody)
        case "gather":
            return np.concatenate(everybody) if rank == call.root else None
        case "scatter":
            return _block(everybody[call.root], call.blocks, rank)
        case "reduce_scatter":
            return _block(folded(call, everybody), call.blocks, rank)
        case "all_to_all":
            rows = [_row(call, source, world) for source in range(world)]
            parts = zip(everybody, rows, strict=True)
            return np.concatenate([_block(data, row, rank) for data, row in parts])
        case "send_recv":
            return everybody[(rank - 1) % world]
    raise ValueError(f"there is no collective {call.kind}")


def folded(call: Call, everybody: Sequence[Array]) -> Array:
    """The reduction of what the ranks bring."""
    if call.dtype == "bool" and call.op in _ALL:
        return np.asarray(np.logical_and.reduce(everybody))
    if call.dtype == "bool" and call.op in _ANY:
        return np.asarray(np.logical_or.reduce(everybody))
    if call.op in _BITS:
        return np.asarray(reduce(_BITS[call.op], everybody))
    stacked = np.stack(everybody)
    match call.op:
        case "sum":
            return np.asarray(stacked.sum(0))
        case "mean":
            return np.asarray(stacked.sum(0) / len(everybody))
        case "premul_sum":
            return np.asarray(stacked.sum(0) * FACTOR)
        case "product":
            return np.asarray(stacked.prod(0))
        case "min":
            return np.asarray(stacked.min(0))
        case "max":
            return np.asarray(stacked.max(0))
    raise ValueError(f"there is no reduction {call.op}")


def sends(call: Call, rank: int, world: int) -> tuple[int, ...]:
    """Of an all-to-all: the elements that a rank sends to each."""
    return _row(call, rank, world)


def receives(call: Call, rank: int, world: int) -> tuple[int, ...]:
    """Of an all-to-all: the elements that a rank gets from each."""
    return call.blocks[rank::world]


def _row(call: Call, rank: int, world: int) -> tuple[int, ...]:
    return call.blocks[rank * world : (rank + 1) * world]


def _brings(call: Call, rank: int, world: int) -> int:
    if call.kind in ("all_gather", "gather"):
        return call.blocks[rank]
    if call.kind == "all_to_all":
        return sum(_row(call, rank, world))
    return sum(call.blocks)


def _block(whole: Array, blocks: Sequence[int], rank: int) -> Array:
    ends = [0, *accumulate(blocks)]
    return whole[ends[rank] : ends[rank + 1]]


def _range(call: Call) -> tuple[int, int]:
    """The least and the greatest number, such that no result of 4 ranks leaves its type."""
    unsigned = call.dtype == "uint8"
    if call.op in _BITS and not unsigned:
        return -128, 127
    low, high = {
        "product": (-2, 2),
        "sum": (-15, 15),
        "mean": (-15, 15),
        "premul_sum": (-15, 15),
    }.get(call.op, (-100, 100))
    return (0, high - low) if unsigned and call.op != "product" else (0 if unsigned else low, high)
