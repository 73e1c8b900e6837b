"""Elements of torch's tensors, as the agent has them in arrays, and back: without a copy."""

from __future__ import annotations

import torch

from allfold_agent.arithmetic.arrays import ARRAY_DTYPES, Array
from allfold_core.dtypes import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.label) for dtype in DType}


def array_of(tensor: torch.Tensor) -> Array:
    """The elements of a tensor; those of bfloat16 as their bits."""
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    array: Array = bits.numpy()
    return array


def tensor_of(array: Array, dtype: DType) -> torch.Tensor:
    """The inverse of :func:`array_of`."""
    assert array.dtype == ARRAY_DTYPES[dtype]
    return torch.from_numpy(array).view(TORCH_DTYPES[dtype])
