"""Reductions with NumPy, in the order and with the bits of the agent's.

Half types are summed and multiplied in float32 and rounded once; a mean is divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allfold._elements import stored_as
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, ReduceOp

Elements = np.ndarray[Any, np.dtype[Any]]
Fold = Callable[[Sequence[Elements], Elements], None]
"""``fold(sources, out)``: ``out`` becomes the left fold of the sources, none of which it is."""

_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def fold_of(fingerprint: Fingerprint, world_size: int) -> Fold:
    """Return the fold of an op; of one that does not reduce, a copy of its one source."""
    op = fingerprint.reduce_op
    if op is None or not fingerprint.kind.reduces:
        return copy
    if fingerprint.dtype is DType.BFLOAT16:
        return _BFloat16Fold(fingerprint, world_size)
    return _Fold(fingerprint, world_size)


def copy(sources: Sequence[Elements], out: Elements) -> None:
    """Write the one source to ``out``."""
    (source,) = sources
    out[...] = source


class _Fold:
    """The fold of types that NumPy has."""

    def __init__(self, fingerprint: Fingerprint, world_size: int) -> None:
        op = fingerprint.reduce_op
        assert op is not None
        kept = fingerprint.kept_dtype
        self._combine = _COMBINE[op]
        # Also the least of half types: of two zeros NumPy takes another one than of wider types.
        is_wide = kept is DType.FLOAT32 or kept.is_half
        self._kept = np.dtype(np.float32) if is_wide else stored_as(kept)
        self._divisor = world_size if op is ReduceOp.MEAN and world_size > 1 else 0
        self._factor = fingerprint.factor if op is ReduceOp.PREMUL_SUM else 1.0
        self._is_plain = kept is fingerprint.dtype and not kept.is_half and self._factor == 1.0

    def __call__(self, sources: Sequence[Elements], out: Elements) -> None:
        try:
            self._reduce(sources, out)
        except (FloatingPointError, RuntimeWarning):
            # This process has NumPy raise where a sum overflows. The op has one outcome all the
            # same: as on all other ranks. To say so before each fold would cost a microsecond.
            with np.errstate(all="ignore"):
                self._reduce(sources, out)

    def _reduce(self, sources: Sequence[Elements], out: Elements) -> None:
        if self._is_plain:
            self._fold(sources, out)
        else:
            self._write(self._folded([self._kept_of(each) for each in sources]), out)

    def _fold(self, sources: Sequence[Elements], out: Elements) -> None:
        combine = self._combine
        if len(sources) == 1:
            out[...] = sources[0]
        else:
            combine(sources[0], sources[1], out=out)
            for source in sources[2:]:
                combine(out, source, out=out)
        if self._divisor:
            np.divide(out, self._divisor, out=out)

    def _folded(self, sources: Sequence[Elements]) -> Elements:
        """Return the fold of elements of the accumulation type, in memory of its own."""
        folded = np.empty_like(sources[0])
        self._fold(sources, folded)
        return folded

    def _kept_of(self, source: Elements) -> Elements:
        kept = source.astype(self._kept, copy=False)
        return kept if self._factor == 1.0 else kept * self._factor

    def _write(self, folded: Elements, out: Elements) -> None:
        out[...] = folded


class _BFloat16Fold(_Fold):
    """The fold of bfloat16."""

    def _kept_of(self, source: Elements) -> Elements:
        kept = widened(source)
        return kept if self._factor == 1.0 else kept * self._factor

    def _write(self, folded: Elements, out: Elements) -> None:
        out[...] = rounded(folded)


def widened(halves: Elements) -> Elements:
    """Return bfloat16 elements, given as their bits, in float32: the upper halves of its bits."""
    bits: Elements = halves.astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def rounded(values: Elements) -> Elements:
    """Return float32 elements rounded to bfloat16, as bits: to the nearest, of two the even one."""
    bits = values.view(np.uint32)
    halves = ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    halves[np.isnan(values)] = 0x7FC0
    return halves
