"""The codecs: how a chunk of the work buffer becomes the bytes of a frame, and back.

:class:`allfold_core.codecs.Wire` says what each format promises.
"""

from __future__ import annotations

from typing import Protocol

import torch

from allfold_core.codecs import INT8_BLOCK, Wire

_LEVELS = 127
# Rounding the bits of a float32 up to a multiple of this leaves 16 significant ones.
_SCALE_GRAIN = 1 << 8
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# 127 times the next one would be infinite.
_LARGEST_SCALE = 2.0**121 * (1 + 2.0**-7 + 2.0**-14)


class Codec(Protocol):
    """One lossy wire format. ``code`` is raw bytes, of the size that the format needs."""

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        """Write the code of ``values``, and round them to what it decodes to."""

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite ``values`` with what the code stands for."""


def codec_of(wire: Wire) -> Codec | None:
    """The codec of a format; ``None`` for the native one."""
    return _CODECS[wire]


class Cast:
    """Each element in a shorter type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        short = code.view(self._dtype)
        short.copy_(values)
        values.copy_(short)

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        values.copy_(code.view(self._dtype))


class BlockScaled:
    """Blocks of int8 with a common scale: first all scales, then all elements."""

    def encode(self, values: torch.Tensor, code: torch.Tensor) -> None:
        for block, scales, levels in _blocks(values, code):
            scaled = block.abs()
            scale, inverse, finite = _scales(scaled.amax(1).to(torch.float32))
            torch.mul(block, inverse[:, None], out=scaled).round_()
            if not finite:
                scaled.nan_to_num_(0.0, 0.0, 0.0)
            scales.copy_(scale)
            levels.copy_(scaled)
            torch.mul(levels, scale[:, None], out=block)

    def decode(self, code: torch.Tensor, values: torch.Tensor) -> None:
        for block, scales, levels in _blocks(values, code):
            torch.mul(levels, scales[:, None], out=block)


_CODECS: dict[Wire, Codec | None] = {
    Wire.NATIVE: None,
    Wire.FLOAT32: Cast(torch.float32),
    Wire.BFLOAT16: Cast(torch.bfloat16),
    Wire.FLOAT16: Cast(torch.float16),
    Wire.INT8: BlockScaled(),
}
"""Every format; they have no state, so the ops of all groups share them."""


def _scales(greatest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The scale of each row, made in place of its greatest magnitude: 0 where all is too small, NaN
    where something is not finite. With what to multiply by instead of dividing by it, and whether
    everything is finite.
    """
    scale = greatest.div_(_LEVELS)
    lowest, highest = scale.aminmax()
    if lowest.item() >= _SMALLEST_SCALE and highest.item() <= _LARGEST_SCALE:
        _round_up(scale)
        return scale, scale.reciprocal(), True
    finite = torch.isfinite(scale)  # before the bits of a NaN become those of a number
    _round_up(scale)
    scale[scale < _SMALLEST_SCALE] = 0.0
    scale[~finite] = float("nan")
    scale.clamp_(max=_LARGEST_SCALE)
    # An infinite reciprocal would make NaN of what is too small to have a level.
    return scale, torch.where(scale > 0, scale.reciprocal(), 0.0), bool(finite.all())


def _round_up(scale: torch.Tensor) -> None:
    """To 16 significant bits, in place."""
    scale.view(torch.int32).add_(_SCALE_GRAIN - 1).bitwise_and_(-_SCALE_GRAIN)


def _blocks(
    values: torch.Tensor, code: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(blocks, scales, levels): the whole blocks as one matrix, and what is left as another."""
    numel = len(values)
    whole = numel // INT8_BLOCK
    start = 4 * -(-numel // INT8_BLOCK)
    scales = code[:start].view(torch.float32)
    levels = code[start:].view(torch.int8)
    full = whole * INT8_BLOCK
    parts = []
    if full:
        shape = (whole, INT8_BLOCK)
        parts.append((values[:full].view(shape), scales[:whole], levels[:full].view(shape)))
    if full < numel:
        parts.append((values[full:].view(1, -1), scales[whole:], levels[full:].view(1, -1)))
    return parts
