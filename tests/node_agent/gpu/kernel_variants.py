"""The variants of the fold kernel that its tests go through."""

from __future__ import annotations

from allfold_agent.gpu.kernels import Variant
from allfold_core.dtypes import DType
from allfold_core.operations import ReduceOp

WORLD_SIZE = 3

F16, BF16, F32, F64 = DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64

COUNTS = (1, 2, 7, 8, 9, 17, 128)


def folding(dtype: DType, op: ReduceOp, inputs: int = WORLD_SIZE) -> Variant:
    """The whole of an op."""
    mean, premul = op is ReduceOp.MEAN, op is ReduceOp.PREMUL_SUM
    return Variant(dtype, op.accumulation_dtype(dtype), dtype, op, inputs, premul, mean)


def contribution(dtype: DType, op: ReduceOp = ReduceOp.SUM, inputs: int = WORLD_SIZE) -> Variant:
    """Return the kernel for a sum that stays in the accumulation type, to go on to other nodes."""
    kept = op.accumulation_dtype(dtype)
    return Variant(dtype, kept, kept, op, inputs, op is ReduceOp.PREMUL_SUM)


def finishing(dtype: DType, divided: bool) -> Variant:
    """Return the kernel that rounds what comes from other nodes."""
    kept = ReduceOp.SUM.accumulation_dtype(dtype)
    return Variant(kept, kept, dtype, None, 1, divided=divided)


# A round is done in the memory of the host.
OPS = [
    (dtype, op)
    for dtype in DType
    for op in ReduceOp
    if op is not ReduceOp.WEIGHTED_MEAN and op.refusal(dtype) is None
]
WHOLE = [folding(dtype, op) for dtype, op in OPS]
COUNTED = [folding(dtype, ReduceOp.SUM, count) for dtype in (F32, BF16) for count in COUNTS]
BEGUN = [
    contribution(each, op) for each in (F16, BF16) for op in (ReduceOp.SUM, ReduceOp.PREMUL_SUM)
]
ENDED = [finishing(dtype, divided) for dtype in (F16, BF16, F32) for divided in (False, True)]
WIDENED = [Variant(dtype, F32, F32, None, 1) for dtype in (F16, BF16)]
MOVED = [Variant(dtype, dtype, dtype, None, 1) for dtype in DType]
EVERY = list(
    {each.name: each for each in [*WHOLE, *COUNTED, *BEGUN, *ENDED, *WIDENED, *MOVED]}.values()
)
