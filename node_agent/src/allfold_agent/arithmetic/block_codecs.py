"""The codecs whose elements share scales by blocks: a code has all scales first, then all elements.

A block with anything in it that is not finite has scales of NaN, and elements of zero bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.halves import BLOCK, HALVES, scratch
from allfold_core.dtypes import DType, Wire

_BFLOAT16 = HALVES[DType.BFLOAT16]
_SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_BFLOAT16 = np.float32(2.0**128 - 2.0**120)

_LEVELS_OF_INT8 = np.float32(127)
# Rounding the bits of a float32 up to a multiple of this leaves 16 significant ones.
_SCALE_GRAIN = 1 << 8
# 127 times the next one would be infinite.
_LARGEST_SCALE_OF_INT8 = np.float32(2.0**121 * (1 + 2.0**-7 + 2.0**-14))

# A seventh of the largest float32 is rounded down to bfloat16, so 7 times it is not infinite.
_LEVELS_OF_INT4 = np.float32(7)
# A float32 that this was added to has the nearest integer in its lowest bits.
_TO_LOWEST_BITS = np.float32(1.5 * 2.0**23)

# Which magnitudes are great: those of more than so much of the mean and so much of the greatest. Of
# 256 normal numbers that is 1.01 standard deviations, where the best quantizer to four levels has
# 0.98 (J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6, 1960). The greatest
# counts so that a few that are far greater than all others are not averaged with these.
_OF_MEAN, _OF_GREATEST = 1 / 2, 1 / 5


class BlockScaled:
    """Elements of int8, of a common scale in float32."""

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        for block, scales, elements in blocks_of(Wire.INT8, values, code, owed):
            scaled = np.abs(block, out=scratch_like(block))
            scale, inverse, finite = _scales_of_int8(scaled.max(axis=1).astype(np.float32))
            np.rint(np.multiply(block, inverse[:, None], out=scaled), out=scaled)
            scales.view(np.float32)[:, 0] = scale
            levels = elements.view(np.int8).reshape(block.shape)
            np.copyto(levels, scaled, casting="unsafe")
            _clear_blocks(levels, finite)
            np.multiply(levels, scale[:, None], out=block)

    def decode(self, code: memoryview, values: Array) -> None:
        for block, scales, elements in blocks_of(Wire.INT8, values, code):
            levels = elements.view(np.int8).reshape(block.shape)
            np.multiply(levels, scales.view(np.float32), out=block)


class Quantized(NamedTuple):
    """Blocks, one per row, of elements of a few bits.

    Attributes:
        scales: one row of a block's scales per block: numbers of bfloat16, in float32.
        elements: the bits of each, one byte per element.
    """

    scales: Array
    elements: Array


class Packed:
    """Elements of 1, 2 or 4 bits, the first of a byte in its lowest ones; scales in bfloat16.

    Args:
        levels: for each scale of a block, how many times it counts in an element, by its bits.
        quantize: makes scales and elements of blocks in float32, one per row.
    """

    def __init__(
        self, wire: Wire, levels: tuple[list[int], ...], quantize: Callable[[Array], Quantized]
    ) -> None:
        self._wire = wire
        self._quantize = quantize
        bits_of_bytes = np.arange(256)[:, None] >> np.arange(0, 8, wire.bits) & (1 << wire.bits) - 1
        self._levels_of_bytes = [np.array(each, np.float32)[bits_of_bytes] for each in levels]

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        for block, scales, elements in blocks_of(self._wire, values, code, owed):
            quantized = self._quantize(block.astype(np.float32, copy=False))
            _BFLOAT16.narrow(quantized.scales.reshape(-1), scales.view(np.uint16).reshape(-1))
            elements[...] = _pack(quantized.elements.reshape(-1), self._wire.bits)
            self._decode(quantized.scales, elements, block)

    def decode(self, code: memoryview, values: Array) -> None:
        for block, scales, elements in blocks_of(self._wire, values, code):
            halves = scales.view(np.uint16)
            wide = np.empty(halves.shape, np.float32)
            _BFLOAT16.widen(halves, wide)
            self._decode(wide, elements, block)

    def _decode(self, scales: Array, elements: Array, block: Array) -> None:
        for index, levels in enumerate(self._levels_of_bytes):
            whole = scratch.values[: len(elements) * levels.shape[1]]
            # Any mode but "raise" writes to the memory given, not by way of a copy.
            levels.take(elements, axis=0, out=whole.reshape(-1, levels.shape[1]), mode="clip")
            times = whole[: block.size].reshape(block.shape)
            scale = scales[:, index, None]
            if index:
                block += np.multiply(times, scale, out=times)
            else:
                np.multiply(times, scale, out=block)


def to_nearest(rows: Array) -> Quantized:
    """The nearest of -7 to 7 times a scale, which is a seventh of the greatest magnitude."""
    scaled = np.abs(rows, out=scratch_like(rows))
    scale, finite = rounded_scales(scaled.max(axis=1) / _LEVELS_OF_INT4)
    np.multiply(rows, _inverse(scale)[:, None], out=scaled)
    scaled += _TO_LOWEST_BITS
    elements = scaled.view(np.uint32).astype(np.uint8)
    elements &= 15
    _clear_blocks(elements, finite)
    return Quantized(scale[:, None], elements)


def to_two_magnitudes(rows: Array) -> Quantized:
    """The mean of the small magnitudes or that of the great ones, with the sign."""
    numel = rows.shape[1]
    magnitudes = np.abs(rows, out=scratch_like(rows))
    total = _sums(magnitudes)
    limit = total * (_OF_MEAN / numel) + magnitudes.max(axis=1) * _OF_GREATEST
    is_great = magnitudes > limit.astype(np.float32)[:, None]
    weights = scratch.others[: rows.size].reshape(rows.shape)
    np.copyto(weights, ~is_great)
    smalls = weights.sum(axis=1)
    # Not of the great ones: in a difference, what is small would be lost beside what is great.
    total_of_small = _sums(np.multiply(magnitudes, weights, out=magnitudes))
    small, finite = rounded_scales(total_of_small / np.maximum(smalls, 1))
    great, _ = rounded_scales((total - total_of_small) / np.maximum(numel - smalls, 1))
    elements = np.signbit(rows).view(np.uint8)
    elements += is_great.view(np.uint8) << 1
    _clear_blocks(elements, finite)
    return Quantized(np.stack((small, great), axis=1), elements)


def to_sign(rows: Array) -> Quantized:
    """The mean magnitude, with the sign."""
    scale, finite = rounded_scales(_sums(np.abs(rows, out=scratch_like(rows))) / rows.shape[1])
    elements = np.signbit(rows).view(np.uint8)
    _clear_blocks(elements, finite)
    return Quantized(scale[:, None], elements)


def with_owed(values: Array, owed: Array | None) -> Iterator[Array]:
    """Yield the values with what is owed to them, which is what their rounding costs afterwards."""
    if owed is None:
        yield values
        return
    values += owed
    owed[...] = values
    yield values
    owed -= values
    # A step that overflows is skipped; it must not spoil those after it.
    finite = np.isfinite(owed)
    if not finite.all():
        owed[~finite] = 0.0


def blocks_of(
    wire: Wire,
    values: Array,
    code: memoryview,
    owed: Array | None = None,
    at_once: int = BLOCK,
) -> Iterator[tuple[Array, Array, Array]]:
    """(blocks, scales, elements): whole blocks as rows of matrices, and what is left as another.

    Scales are bytes, a row for each block; elements are bytes, flat. As soon as blocks are encoded,
    while they are in the caches, ``owed`` has what that has cost.
    """
    numel, size = len(values), wire.block
    start = wire.scales_nbytes(numel)
    scales = np.frombuffer(code[:start], np.uint8).reshape(-1, wire.scale_bytes)
    elements = np.frombuffer(code[start:], np.uint8)
    whole = numel - numel % size
    for first in (*range(0, whole, at_once), *([whole] if whole < numel else [])):
        last = min(first + at_once, whole) if first < whole else numel
        for part in with_owed(values[first:last], None if owed is None else owed[first:last]):
            yield (
                part.reshape(-1, min(size, last - first)),
                scales[first // size : -(-last // size)],
                elements[wire.elements_nbytes(first) : wire.elements_nbytes(last)],
            )


def scratch_like(block: Array) -> Array | None:
    """Memory of this thread for as many numbers, if they are float32."""
    if block.dtype != np.float32:
        return None
    return scratch.values[: block.size].reshape(block.shape)


def _pack(elements: Array, bits: int) -> Array:
    """Join elements of so many bits each, one per byte, to whole bytes; zeros fill the last one."""
    missing = -len(elements) % (8 // bits)
    if missing:
        elements = np.append(elements, np.zeros(missing, np.uint8))
    while bits < 8:
        pairs = elements.view("<u2")  # the first one in the lower byte
        elements = (pairs | pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return elements


def _clear_blocks(elements: Array, finite: Array) -> None:
    if not finite.all():
        elements[~finite] = 0


def _sums(rows: Array) -> Array:
    """The sum of each row, which is finite if all of it is."""
    sums: Array = rows.sum(axis=1)
    return sums if np.isfinite(sums).all() else rows.sum(axis=1, dtype=np.float64)


def rounded_scales(scale: Array) -> tuple[Array, Array]:
    """Scales rounded to bfloat16: 0 where they are too small, NaN where they are not finite. With
    whether they are.
    """
    finite = np.isfinite(scale)
    rounded = np.minimum(scale, _LARGEST_BFLOAT16).astype(np.float32)
    halves = np.empty(rounded.shape, np.uint16)
    _BFLOAT16.round(rounded, halves)
    _BFLOAT16.widen(halves, rounded)
    rounded[rounded < _SMALLEST_SCALE] = 0.0
    rounded[~finite] = np.nan
    return rounded, finite


def _scales_of_int8(greatest: Array) -> tuple[Array, Array, Array]:
    """The scale of each row, made in place of its greatest magnitude: 0 where all is too small, NaN
    where something is not finite. With what to multiply by instead of dividing by it, and whether
    everything in a row is finite.
    """
    scale = np.divide(greatest, _LEVELS_OF_INT8, out=greatest)
    finite = np.isfinite(scale)  # before the bits of a NaN become those of a number
    if scale.min() >= _SMALLEST_SCALE and scale.max() <= _LARGEST_SCALE_OF_INT8:
        _round_up(scale)
        return scale, np.reciprocal(scale), finite
    _round_up(scale)
    scale[scale < _SMALLEST_SCALE] = 0.0
    scale[~finite] = np.nan
    np.minimum(scale, _LARGEST_SCALE_OF_INT8, out=scale)
    return scale, _inverse(scale), finite


def _inverse(scale: Array) -> Array:
    """Return the reciprocals of scales; 0 where a scale is 0 or NaN."""
    # An infinite reciprocal would make NaN of what is too small to have a level.
    inverse = np.zeros_like(scale)
    np.reciprocal(scale, out=inverse, where=scale > 0)
    return inverse


def _round_up(scale: Array) -> None:
    """To 16 significant bits, in place."""
    bits = scale.view(np.int32)
    bits += _SCALE_GRAIN - 1
    bits &= -_SCALE_GRAIN
