"""The arithmetic: folding, finishing and copying ranges of elements with torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, ReduceOp

TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.label) for dtype in DType}

# For booleans torch.add is "or" and torch.mul is "and", as NCCL has it.
_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class Arithmetic:
    """The arithmetic of one op: its element type, its accumulation type and its reduction.

    Half types are summed and multiplied in float32 and rounded once, when the result is written;
    a mean is divided once, in the accumulation type, just before.

    Attributes:
        given: type of the elements of ranks.
        kept_type: accumulation type.
        reduce_op: ``None`` where elements are only moved.
        divisor: of a mean; 0 where nothing is divided.
        factor: what every input is multiplied by first.
    """

    def __init__(self, fingerprint: Fingerprint, world_size: int) -> None:
        op = fingerprint.reduce_op
        dtype, kept = fingerprint.dtype, fingerprint.kept_dtype
        self.given, self.kept_type = dtype, kept
        self.reduce_op = op if fingerprint.kind.reduces else None
        self.dtype = TORCH_DTYPES[dtype]
        self.itemsize = dtype.itemsize
        self.kept_dtype = TORCH_DTYPES[kept]
        self.kept_itemsize = kept.itemsize
        self.converts = kept is not dtype
        self._combine = _COMBINE[self.reduce_op] if self.reduce_op else None
        self.divisor = world_size if op is ReduceOp.MEAN and world_size > 1 else 0
        self.factor = fingerprint.factor if op is ReduceOp.PREMUL_SUM else 1.0

    @property
    def takes_inputs_as_they_are(self) -> bool:
        """True if inputs are folded as they are, neither converted nor multiplied."""
        return not self.converts and self.factor == 1.0

    def elements(self, memory: torch.Tensor) -> torch.Tensor:
        """Raw memory of a rank as elements of the op's dtype."""
        return memory.view(self.dtype)

    def kept(self, memory: torch.Tensor, numel: int) -> torch.Tensor:
        """``numel`` elements of the accumulation type at the start of raw memory."""
        return memory[: numel * self.kept_itemsize].view(self.kept_dtype)

    def fold_inputs(self, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """``out`` becomes the fold of what ranks brought: each multiplied first, if need be."""
        if self.factor != 1.0:
            inputs = [each.to(self.kept_dtype) * self.factor for each in inputs]
        self.fold(out, inputs)

    def fold(self, out: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
        """``out`` becomes the left fold of the operands.

        ``out`` is of the accumulation type and may be the memory of one operand; it must not be
        that of an operand after the second unless it is written last.
        """
        first, *rest = operands
        if not rest:
            if out.data_ptr() != first.data_ptr():
                out.copy_(first)
            return
        if self._combine is None:
            raise AssertionError(f"{len(operands)} operands for an op that does not reduce")
        if self.converts:
            self._fold_converting(out, first, rest)
            return
        if len(rest) == 1:
            self._combine(first, rest[0], out=out)
            return
        target = out if all(out.data_ptr() != late.data_ptr() for late in rest[1:]) else None
        folded = self._combine(first, rest[0], out=target)
        for operand in rest[1:]:
            folded = self._combine(folded, operand, out=folded)
        if target is None:
            out.copy_(folded)

    def _fold_converting(
        self, out: torch.Tensor, first: torch.Tensor, rest: Sequence[torch.Tensor]
    ) -> None:
        assert self._combine is not None
        folded = first.to(self.kept_dtype, copy=True)
        for operand in rest:
            self._combine(folded, operand, out=folded)
        out.copy_(folded)

    def finish(self, outputs: Sequence[torch.Tensor], kept: torch.Tensor) -> None:
        """Write the result, divided and rounded once, to every output."""
        if not outputs:
            return
        first, *rest = outputs
        if self.divisor and self.converts:
            first.copy_(kept / self.divisor)
        elif self.divisor:
            torch.div(kept, self.divisor, out=first)
        elif first.data_ptr() != kept.data_ptr():
            first.copy_(kept)
        for output in rest:
            if output.data_ptr() != first.data_ptr():
                output.copy_(first)
