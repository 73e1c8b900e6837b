"""The codecs: how a chunk of the work buffer becomes the bytes of a frame, and back.

:class:`allfold_core.dtypes.Wire` says what each format promises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array
from allfold_agent.arithmetic.block_codecs import (
    BlockScaled,
    Packed,
    to_nearest,
    to_sign,
    to_two_magnitudes,
    with_owed,
)
from allfold_agent.arithmetic.halves import BLOCK, HALVES, Half, scratch
from allfold_agent.arithmetic.sparse_codec import Sparse
from allfold_core.dtypes import DType, Wire

# A nibble is a number of -8 to 7, of which -8 has no use.
_NIBBLES = [*range(8), *range(-8, 0)]


class Codec(Protocol):
    """One lossy wire format. ``code`` is raw bytes, of the size that the format needs."""

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        """Write the code of ``values``, and round them to what it decodes to.

        What is ``owed`` to them is added before, and becomes what the rounding costs; 0 where that
        is not finite.
        """

    def decode(self, code: memoryview, values: Array) -> None:
        """Overwrite ``values`` with what the code stands for."""


def codec_of(wire: Wire) -> Codec | None:
    """The codec of a format; ``None`` for the native one."""
    return _CODECS[wire]


class Cast:
    """Each element in float32."""

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        short = np.frombuffer(code, np.float32)
        for each in with_owed(values, owed):
            short[...] = each
            each[...] = short

    def decode(self, code: memoryview, values: Array) -> None:
        values[...] = np.frombuffer(code, np.float32)


class HalfCast:
    """Each element in a half type; those of float64 by way of float32."""

    def __init__(self, dtype: DType) -> None:
        self._half: Half = HALVES[dtype]
        self._dtype = ARRAY_DTYPES[dtype]

    def encode(self, values: Array, code: memoryview, owed: Array | None = None) -> None:
        for part, short in self._blocks(values, code, owed):
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

    def _blocks(
        self, values: Array, code: memoryview, owed: Array | None = None
    ) -> Iterator[tuple[Array, Array]]:
        halves = np.frombuffer(code, self._dtype)
        for start in range(0, len(values), BLOCK):
            each = slice(start, start + BLOCK)
            for part in with_owed(values[each], None if owed is None else owed[each]):
                yield part, halves[each]


def _as_float32(part: Array) -> Array:
    """A block itself, or scratch memory for it where it is of another type."""
    return part if part.dtype == np.float32 else scratch.values[: len(part)]


_CODECS: dict[Wire, Codec | None] = {
    Wire.NATIVE: None,
    Wire.FLOAT32: Cast(),
    Wire.BFLOAT16: HalfCast(DType.BFLOAT16),
    Wire.FLOAT16: HalfCast(DType.FLOAT16),
    Wire.INT8: BlockScaled(),
    Wire.INT4: Packed(Wire.INT4, (_NIBBLES,), to_nearest),
    Wire.INT2: Packed(Wire.INT2, ([1, -1, 0, 0], [0, 0, 1, -1]), to_two_magnitudes),
    Wire.SIGN: Packed(Wire.SIGN, ([1, -1],), to_sign),
    Wire.TOPK: Sparse(),
}
"""Every format; they have no state, so the ops of all groups share them."""
