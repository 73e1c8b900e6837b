"""The fold of short chunks, with NumPy: its first call after a pause takes a third of torch's.

The results have the same bits as those of :class:`allfold_agent.arithmetic.kernels.Arithmetic`, but
for the payloads of NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

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


ARRAY_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype("int16" if dtype is DType.BFLOAT16 else dtype.label) for dtype in DType
}
"""The types of elements in arrays; those of bfloat16, which NumPy has not, are their bits."""


def array_fold(arithmetic: Arithmetic) -> ArrayFold:
    """Return the fold of arrays of an op's accumulation type."""
    is_ordered = arithmetic.reduce_op in (ReduceOp.MIN, ReduceOp.MAX)
    is_torchs = is_ordered and arithmetic.kept_type.is_float
    return (_TensorFold if is_torchs else ArrayFold)(arithmetic)


class ArrayFold:
    """The fold of arrays of an op's accumulation type.

    A sum that overflows is no matter for a warning: who serves ops switches those off in its thread
    (``np.seterr``), as to do so for each fold takes as long as the fold.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._combine = _COMBINE.get(arithmetic.reduce_op) if arithmetic.reduce_op else None
        self._arithmetic = arithmetic

    def fold(self, out: Array, operands: Sequence[Array]) -> None:
        """``out`` becomes the left fold of the operands; it may be the memory of one of them."""
        combine = self._combine
        if len(operands) == 1 or combine is None:
            (out[...],) = operands
            return
        first, second, *rest = operands
        if not rest:
            combine(first, second, out=out)
            return
        target = out if not any(np.may_share_memory(out, late) for late in rest) else None
        folded = combine(first, second, out=target)
        for operand in rest:
            folded = combine(folded, operand, out=folded)
        if target is None:
            out[...] = folded

    def divide(self, out: Array, sums: Array) -> None:
        """``out`` becomes the mean."""
        np.divide(sums, self._arithmetic.divisor, out=out)


class _TensorFold(ArrayFold):
    """The least or the greatest of floats: which of two zeros that is, NumPy decides otherwise."""

    def fold(self, out: Array, operands: Sequence[Array]) -> None:
        self._arithmetic.fold(self._tensor(out), [self._tensor(each) for each in operands])

    def _tensor(self, elements: Array) -> torch.Tensor:
        return torch.from_numpy(elements).view(self._arithmetic.kept_dtype)
