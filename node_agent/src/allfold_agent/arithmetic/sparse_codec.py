"""The sparse codec: of each block only the elements of the greatest magnitudes, with their places.

The selection is exact and reads all elements but twice: the greatest of groups of elements give a
threshold that as many elements as are wanted reach, and hardly more. Only these are sorted.
"""

from __future__ import annotations

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.block_codecs import blocks_of, rounded_scales, scratch_like
from allfold_agent.arithmetic.halves import BLOCK, HALVES
from allfold_core.dtypes import DType, Wire

_BFLOAT16 = HALVES[DType.BFLOAT16]
_WIRE = Wire.TOPK
_PLACE_BITS = _WIRE.bits - 1  # beside the sign
# Longer groups have lower thresholds, and shorter ones more greatest elements to search.
_GROUP = 16
_FEW = 4  # times what is wanted
# How many of the chosen elements, in falling order, share a scale. The greatest has its own, so
# that it is not averaged with those that it may be far above.
_SHARING = np.array([1, 1, 2, 4, 8, 16, 32])
_ENDS = _SHARING.cumsum()
_STARTS = _ENDS - _SHARING
_ALL_BITS = 0x7FFFFFFF  # of a magnitude in float32
_ROW_SHIFT = 31 + _PLACE_BITS
# What is searched at a time stays in caches. What is found is little, and takes longer in parts.
_ROWS = BLOCK // _WIRE.block
_AT_ONCE = 8 * BLOCK


class Sparse:
    """A 64th of the elements of a block, in falling order: places, with the signs as lowest bits.

    Blocks and what is chosen of them are rows.
    """

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        for block, scales, elements in blocks_of(_WIRE, values, code, owed, _AT_ONCE):
            rows = block.astype(np.float32, copy=False)
            at, magnitudes, finite = _greatest(rows)
            numbers = at % rows.shape[1] << 1 | np.signbit(rows.reshape(-1)[at])
            if not finite.all():
                numbers[~finite], magnitudes[~finite] = 0, np.nan
            wide = _means(magnitudes)
            _BFLOAT16.narrow(wide.reshape(-1), scales.view(np.uint16).reshape(-1))
            elements[...] = _pack(numbers)
            _decode(wide, numbers, block)

    def decode(self, code: memoryview, values: Array) -> None:
        for block, scales, elements in blocks_of(_WIRE, values, code, at_once=_AT_ONCE):
            halves = scales.view(np.uint16)
            wide = np.empty(halves.shape, np.float32)
            _BFLOAT16.widen(halves, wide)
            numbers = _unpack(elements, len(block) * _WIRE.travelling(block.shape[1]))
            _decode(wide, numbers.reshape(len(block), -1), block)


def _greatest(rows: Array) -> tuple[Array, Array, Array]:
    """(at, magnitudes, finite): the elements of the greatest magnitudes of each row, in falling
    order, of equal ones the first. With whether all of the row is finite; if not, any are taken.

    Where they are is counted through all rows.
    """
    blocks, numel = rows.shape
    count = _WIRE.travelling(numel)
    finite = np.empty(blocks, np.bool_)
    found: list[Array] = []
    for first in range(0, blocks, _ROWS):
        part = slice(first, first + _ROWS)
        keys, finite[part] = _candidates(rows[part], count)
        found.append(keys + (first << _ROW_SHIFT))
    keys = np.concatenate(found)
    starts = np.searchsorted(keys, np.arange(blocks) << _ROW_SHIFT)
    chosen = keys[starts[:, None] + np.arange(count)]
    bits = _ALL_BITS - (chosen >> _PLACE_BITS & _ALL_BITS)
    at = chosen & (1 << _PLACE_BITS) - 1
    at += np.arange(0, rows.size, numel)[:, None]
    return at, bits.astype(np.int32).view(np.float32), finite


def _candidates(rows: Array, count: int) -> tuple[Array, Array]:
    """(keys, finite): as many elements of each row as are wanted, and hardly more.

    Sorted keys are in the order of rows, then of falling magnitudes, then of places.
    """
    numel = rows.shape[1]
    magnitudes = np.abs(rows, out=scratch_like(rows))
    grouped = magnitudes.reshape(len(rows), _GROUP if numel == _WIRE.block else 1, -1)
    greatest = grouped.max(axis=1)
    finite = np.isfinite(greatest.max(axis=1))
    if not finite.all():
        magnitudes[~finite] = greatest[~finite] = 0
    greatest.partition(-count, axis=1)
    threshold = greatest[:, -count, None]
    reaching = magnitudes >= threshold
    if np.count_nonzero(reaching) <= _FEW * count * len(rows):
        at = np.flatnonzero(reaching)
    else:  # most of them are equal, and need not all be sorted
        above = np.flatnonzero(magnitudes > threshold)
        at = np.concatenate((above, _first_of_each(magnitudes == threshold, count)))
    below = _ALL_BITS - magnitudes.view(np.int32).reshape(-1)[at].astype(np.int64)
    row = at // numel
    keys = row << _ROW_SHIFT | below << _PLACE_BITS | at - row * numel
    keys.sort()
    return keys, finite


def _first_of_each(flags: Array, count: int) -> Array:
    """The first elements of each row that are flagged, counted through all rows."""
    at = np.flatnonzero(flags)
    bounds = np.searchsorted(at, np.arange(len(flags) + 1) * flags.shape[1])
    firsts = bounds[:-1, None] + np.arange(count)
    chosen: Array = at[firsts[firsts < bounds[1:, None]]]
    return chosen


def _means(magnitudes: Array) -> Array:
    """The scales of each row; 0 those that no element has."""
    count = magnitudes.shape[1]
    starts = _STARTS[count > _STARTS]
    sums = np.add.reduceat(magnitudes, starts, axis=1, dtype=np.float64)
    means = np.zeros((len(magnitudes), len(_SHARING)))
    means[:, : len(starts)] = sums / (np.minimum(_ENDS[: len(starts)], count) - starts)
    return rounded_scales(means.reshape(-1))[0].reshape(means.shape)


def _decode(scales: Array, numbers: Array, block: Array) -> None:
    first = scales[:, :1]
    block[...] = first - first  # 0, or NaN if the block is
    magnitudes = scales.repeat(_SHARING, axis=1)[:, : numbers.shape[1]]
    at = (numbers >> 1) + np.arange(0, block.size, block.shape[1])[:, None]
    block.reshape(-1)[at] = np.where(numbers & 1, -magnitudes, magnitudes)


def _pack(numbers: Array) -> Array:
    whole = numbers.astype("<u2").reshape(-1, 1).view(np.uint8)
    bits = np.unpackbits(whole, axis=1, bitorder="little")[:, : _WIRE.bits]
    return np.packbits(bits, bitorder="little")


def _unpack(elements: Array, count: int) -> Array:
    bits = np.arange(0, count * _WIRE.bits, _WIRE.bits)
    padded = np.append(elements, np.zeros(3, np.uint8))
    from_each_byte: Array = np.ndarray(len(elements), "<u4", padded, strides=(1,))
    numbers: Array = from_each_byte[bits >> 3].astype(np.int64) >> (bits & 7)
    numbers &= (1 << _WIRE.bits) - 1
    return numbers
