"""Tensors for tests, of NumPy or torch, from integers and back to bytes. Used inside workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import allfold

_TORCH_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def from_integers(values: npt.NDArray[np.int64], dtype: str, *, torch: bool = False) -> Any:
    """A tensor of a dtype that holds the values; bfloat16 is always torch's."""
    if torch or dtype == "bfloat16":
        import torch as library

        return library.from_numpy(values).to(getattr(library, dtype))
    return values.astype(dtype)


def from_bytes(data: bytes, shape: Sequence[int], dtype: str, *, torch: bool = False) -> Any:
    """A tensor of a dtype with these bits; what NumPy lacks is always torch's."""
    raw = np.frombuffer(bytearray(data), np.uint8)
    if not torch and dtype not in _TORCH_ONLY:
        return raw.view(np.dtype(dtype)).reshape(tuple(shape))
    import torch as library

    tensor = library.empty(tuple(shape), dtype=getattr(library, dtype))
    if data:
        tensor.reshape(-1).view(library.uint8).copy_(library.from_numpy(raw))
    return tensor


def strided(tensor: Any) -> tuple[Any, Any]:
    """A base of twice the size, and a copy of a tensor in every second element of it."""
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1])
    if isinstance(tensor, np.ndarray):
        base: Any = np.zeros(shape, tensor.dtype)
    else:
        base = tensor.new_empty(shape)
        base.view(dtype=_uint8()).zero_()
    base[..., ::2] = tensor
    return base, base[..., ::2]


def _uint8() -> Any:
    import torch

    return torch.uint8


def in_arena(tensor: Any, group: allfold.Group) -> Any:
    """A copy of a tensor in the arena."""
    shared = group.empty(tuple(tensor.shape), tensor.dtype)
    shared[...] = tensor
    return shared


def to_bytes(tensor: Any) -> bytes:
    """The elements in C order, bit for bit."""
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    import torch

    fresh = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    raw: bytes = fresh.view(torch.uint8).numpy().tobytes() if fresh.numel() else b""
    return raw


def to_list(tensor: Any) -> list[Any]:
    values: list[Any] = tensor.reshape(-1).tolist()
    return values
