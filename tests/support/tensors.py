"""Tensors for tests, of NumPy or torch, from integers and back to bytes. Used inside workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import allfold


def from_integers(values: npt.NDArray[np.int64], dtype: str, *, torch: bool = False) -> Any:
    """A tensor of a dtype that holds the values; bfloat16 is always torch's."""
    if torch or dtype == "bfloat16":
        import torch as library

        return library.from_numpy(values).to(getattr(library, dtype))
    return values.astype(dtype)


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
