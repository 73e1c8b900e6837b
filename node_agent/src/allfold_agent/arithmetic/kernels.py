"""The arithmetic: folding, finishing and copying ranges of elements with NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array, copy, overlap
from allfold_agent.arithmetic.halves import BLOCK, HALVES, scratch
from allfold_core.operations import Fingerprint, ReduceOp

# For booleans np.add is "or" and np.multiply is "and", as NCCL has it.
_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PREMUL_SUM: np.add,
    ReduceOp.WEIGHTED_MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


class Arithmetic:
    """The arithmetic of one op: its element type, its accumulation type and its reduction.

    Half types are summed and multiplied in float32 and rounded once, when the result is written;
    a mean is divided once, in the accumulation type, just before. Of equal zeros the last one is
    the least, and the greatest.

    A sum that overflows is no matter for a warning: threads that fold are started with those
    switched off, as to do so for each fold takes as long as a short one.

    Attributes:
        given: type of the elements of ranks.
        kept_type: accumulation type.
        reduce_op: ``None`` where elements are only moved.
        dtype: the type of the elements of ranks in arrays.
        kept_dtype: the accumulation type in arrays.
        divisor: of a mean; 0 where nothing is divided.
        factor: what every input is multiplied by first, where all have the same.
        is_weighted: every input has a factor of its own, and every op its divisor.
    """

    def __init__(self, fingerprint: Fingerprint, world_size: int) -> None:
        op = fingerprint.reduce_op
        dtype, kept = fingerprint.dtype, fingerprint.kept_dtype
        self.given, self.kept_type = dtype, kept
        self.reduce_op = op if fingerprint.kind.reduces else None
        self.dtype = ARRAY_DTYPES[dtype]
        self.itemsize = dtype.itemsize
        self.kept_dtype = ARRAY_DTYPES[kept]
        self.kept_itemsize = kept.itemsize
        self.converts = kept is not dtype
        self._combine = _COMBINE[self.reduce_op] if self.reduce_op else None
        self._half = HALVES.get(dtype) if self.reduce_op or self.converts else None
        self.divisor = world_size if op is ReduceOp.MEAN and world_size > 1 else 0
        self.factor = fingerprint.factor if op is ReduceOp.PREMUL_SUM else 1.0
        self.is_weighted = op is ReduceOp.WEIGHTED_MEAN

    @property
    def takes_inputs_as_they_are(self) -> bool:
        """True if inputs are folded as they are, neither converted nor multiplied."""
        return not self.converts and self.factor == 1.0 and not self.is_weighted

    def elements(self, memory: memoryview) -> Array:
        """Raw memory of a rank as elements of the op's dtype."""
        return np.frombuffer(memory, self.dtype)

    def kept(self, memory: memoryview, numel: int) -> Array:
        """``numel`` elements of the accumulation type at the start of raw memory."""
        return np.frombuffer(memory, self.kept_dtype, numel)

    def fold_inputs(
        self, out: Array, inputs: Sequence[Array], factors: Sequence[float] | None = None
    ) -> None:
        """``out`` becomes the fold of what ranks brought: each multiplied first, if need be.

        Args:
            factors: of a weighted mean, which may have no input.
        """
        if self.takes_inputs_as_they_are:
            self.fold(out, inputs)
            return
        if factors is None:
            factors = [self.factor] * len(inputs)
        if not inputs:
            out.fill(0)
        elif self.converts:
            self._fold_widened(out, inputs, factors)
        elif len(inputs) == 1:
            self._multiplied(inputs[0], factors[0], out)
        else:
            pairs = zip(inputs, factors, strict=True)
            self.fold(out, [self._multiplied(x, factor, np.empty_like(x)) for x, factor in pairs])

    def fold(self, out: Array, operands: Sequence[Array]) -> None:
        """``out`` becomes the left fold of the operands; it may be the memory of one of them.

        All are of the accumulation type.
        """
        combine = self._combine
        if len(operands) == 1:
            copy(out, operands[0])
        elif combine is None:
            raise AssertionError(f"{len(operands)} operands for an op that does not reduce")
        elif self._half is not None and not self.converts:
            self._fold_halves(out, operands)
        else:
            first, second, *rest = operands
            if not rest:
                combine(first, second, out=out)
                return
            target = None if any(overlap(out, late) for late in rest) else out
            folded = combine(first, second, out=target)
            for operand in rest:
                combine(folded, operand, out=folded)
            if target is None:
                out[...] = folded

    def _multiplied(self, values: Array, factor: float, out: Array) -> Array:
        product: Array = np.multiply(values, self.kept_dtype.type(factor), out=out)
        return product

    def _fold_widened(self, out: Array, inputs: Sequence[Array], factors: Sequence[float]) -> None:
        """Fold half types in float32, to ``out``, which is no input."""
        for block in _blocks(len(out)):
            folded = out[block]
            self._bring(inputs[0][block], factors[0], folded)
            other = scratch.others[: len(folded)]
            for each, factor in zip(inputs[1:], factors[1:], strict=True):
                self._bring(each[block], factor, other)
                self._combined(folded, other)

    def _fold_halves(self, out: Array, operands: Sequence[Array]) -> None:
        """Fold half types to one of them: each result is one of the operands."""
        half = self._half
        assert half is not None
        for block in _blocks(len(out)):
            folded = scratch.values[: len(operands[0][block])]
            half.widen(operands[0][block], folded)
            other = scratch.others[: len(folded)]
            for each in operands[1:]:
                half.widen(each[block], other)
                self._combined(folded, other)
            half.narrow(folded, out[block])

    def _bring(self, given: Array, factor: float, out: Array) -> None:
        assert self._half is not None
        self._half.widen(given, out)
        if factor != 1.0:
            self._multiplied(out, factor, out)

    def _combined(self, folded: Array, other: Array) -> None:
        if self._combine is None:
            raise AssertionError("several operands for an op that does not reduce")
        self._combine(folded, other, out=folded)

    def finish(self, outputs: Sequence[Array], kept: Array, divisor: float = 0) -> None:
        """Write the result, divided and rounded once, to every output.

        Args:
            divisor: of a weighted mean.
        """
        if not outputs:
            return
        first, *rest = outputs
        divisor = divisor or self.divisor
        if self.converts:
            self._round(kept, first, divisor)
        elif divisor:
            np.divide(kept, divisor, out=first)
        else:
            copy(first, kept)
        for output in rest:
            copy(output, first)

    def _round(self, kept: Array, out: Array, divisor: float) -> None:
        assert self._half is not None
        for block in _blocks(len(out)):
            values = kept[block]
            if divisor:
                values = np.divide(values, divisor, out=scratch.values[: len(values)])
            self._half.round(values, out[block])


def _blocks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, BLOCK):
        yield slice(start, min(start + BLOCK, numel))
