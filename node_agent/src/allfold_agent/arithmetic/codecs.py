"""The codecs: how a chunk of the work buffer becomes the bytes of a frame, and back.

:class:`allfold_core.dtypes.Wire` says what each format promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array
from allfold_agent.arithmetic.halves import BLOCK, HALVES, Half, scratch
from allfold_core.dtypes import INT8_BLOCK, DType, Wire

_LEVELS = np.float32(127)
# Rounding the bits of a float32 up to a multiple of this leaves 16 significant ones.
_SCALE_GRAIN = 1 << 8
_SMALLEST_SCALE = np.finfo(np.float32).tiny
# 127 times the next one would be infinite.
_LARGEST_SCALE = np.float32(2.0**121 * (1 + 2.0**-7 + 2.0**-14))


class Codec(Protocol):
    """One lossy wire format. ``code`` is raw bytes, of the size that the format needs."""

    def encode(self, values: Array, code: memoryview) -> None:
        """Write the code of ``values``, and round them to what it decodes to."""

    def decode(self, code: memoryview, values: Array) -> None:
        """Overwrite ``values`` with what the code stands for."""


def codec_of(wire: Wire) -> Codec | None:
    """The codec of a format; ``None`` for the native one."""
    return _CODECS[wire]


class Cast:
    """Each element in float32."""

    def encode(self, values: Array, code: memoryview) -> None:
        short = np.frombuffer(code, np.float32)
        short[...] = values
        values[...] = short

    def decode(self, code: memoryview, values: Array) -> None:
        values[...] = np.frombuffer(code, np.float32)


class HalfCast:
    """Each element in a half type; those of float64 by way of float32."""

    def __init__(self, dtype: DType) -> None:
        self._half: Half = HALVES[dtype]
        self._dtype = ARRAY_DTYPES[dtype]

    def encode(self, values: Array, code: memoryview) -> None:
        for part, short in self._blocks(values, code):
            wide = _as_float32(part)
            if wide is not part:
                wide[...] = part
            self._half.round(wide, short)
            self._decode(short, part)

    def decode(self, code: memoryview, values: Array) -> None:
        for part, short in self._blocks(values, code):
            self._decode(short, part)

    def _decode(self, short: Array, part: Array) -> None:
        wide = _as_float32(part)
        self._half.widen(short, wide)
        if wide is not part:
            part[...] = wide

    def _blocks(self, values: Array, code: memoryview) -> Iterator[tuple[Array, Array]]:
        halves = np.frombuffer(code, self._dtype)
        for start in range(0, len(values), BLOCK):
            yield values[start : start + BLOCK], halves[start : start + BLOCK]


def _as_float32(part: Array) -> Array:
    """A block itself, or scratch memory for it where it is of another type."""
    return part if part.dtype == np.float32 else scratch.values[: len(part)]


class BlockScaled:
    """Blocks of int8 with a common scale: first all scales, then all elements."""

    def encode(self, values: Array, code: memoryview) -> None:
        for block, scales, levels in _blocks(values, code):
            scaled = np.abs(block)
            scale, inverse, finite = _scales(scaled.max(axis=1).astype(np.float32))
            np.rint(np.multiply(block, inverse[:, None], out=scaled), out=scaled)
            if not finite:
                clear_nonfinite(scaled)
            scales[...] = scale
            np.copyto(levels, scaled, casting="unsafe")
            np.multiply(levels, scale[:, None], out=block)

    def decode(self, code: memoryview, values: Array) -> None:
        for block, scales, levels in _blocks(values, code):
            np.multiply(levels, scales[:, None], out=block)


_CODECS: dict[Wire, Codec | None] = {
    Wire.NATIVE: None,
    Wire.FLOAT32: Cast(),
    Wire.BFLOAT16: HalfCast(DType.BFLOAT16),
    Wire.FLOAT16: HalfCast(DType.FLOAT16),
    Wire.INT8: BlockScaled(),
}
"""Every format; they have no state, so the ops of all groups share them."""


def clear_nonfinite(values: Array) -> None:
    """What is not finite becomes zero."""
    finite = np.isfinite(values)
    if not finite.all():
        values[~finite] = 0.0


def _scales(greatest: Array) -> tuple[Array, Array, bool]:
    """The scale of each row, made in place of its greatest magnitude: 0 where all is too small, NaN
    where something is not finite. With what to multiply by instead of dividing by it, and whether
    everything is finite.
    """
    scale = np.divide(greatest, _LEVELS, out=greatest)
    if scale.min() >= _SMALLEST_SCALE and scale.max() <= _LARGEST_SCALE:
        _round_up(scale)
        return scale, np.reciprocal(scale), True
    finite = np.isfinite(scale)  # before the bits of a NaN become those of a number
    _round_up(scale)
    scale[scale < _SMALLEST_SCALE] = 0.0
    scale[~finite] = np.nan
    np.minimum(scale, _LARGEST_SCALE, out=scale)
    # An infinite reciprocal would make NaN of what is too small to have a level.
    inverse = np.zeros_like(scale)
    np.reciprocal(scale, out=inverse, where=scale > 0)
    return scale, inverse, bool(finite.all())


def _round_up(scale: Array) -> None:
    """To 16 significant bits, in place."""
    bits = scale.view(np.int32)
    bits += _SCALE_GRAIN - 1
    bits &= -_SCALE_GRAIN


def _blocks(values: Array, code: memoryview) -> list[tuple[Array, Array, Array]]:
    """(blocks, scales, levels): the whole blocks as one matrix, and what is left as another."""
    numel = len(values)
    whole = numel // INT8_BLOCK
    start = 4 * -(-numel // INT8_BLOCK)
    scales = np.frombuffer(code[:start], np.float32)
    levels = np.frombuffer(code[start:], np.int8)
    full = whole * INT8_BLOCK
    parts = []
    if full:
        shape = (whole, INT8_BLOCK)
        parts.append((values[:full].reshape(shape), scales[:whole], levels[:full].reshape(shape)))
    if full < numel:
        last = (1, numel - full)
        parts.append((values[full:].reshape(last), scales[whole:], levels[full:].reshape(last)))
    return parts
