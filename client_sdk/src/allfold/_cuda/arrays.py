"""Arrays in the arena on a GPU, for whichever library takes them from there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from allfold._cuda.gpu import Gpu
from allfold._elements import itemsize_of
from allfold_core.errors import InvalidArgument


class CudaArray:
    """An array that collectives need not copy: ``cupy.asarray`` and ``torch.as_tensor`` take it.

    The memory is the arena's again when nobody has the array, or what was made of it, any more.
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: Any) -> None:
        dtype = np.dtype(dtype)
        block = gpu.allocate_array(prod(shape) * dtype.itemsize)
        self._memory = block.owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (block.address, False),
            "strides": None,
        }
        weakref.finalize(self, gpu.arrays.free, block).atexit = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.__cuda_array_interface__["shape"])

    @property
    def dtype(self) -> Any:
        """The type of its elements, one of NumPy's."""
        return np.dtype(str(self.__cuda_array_interface__["typestr"]))


def empty(gpu: Gpu, shape: Sequence[int], dtype: Any) -> Any:
    """An uninitialized tensor on a GPU: torch's for a torch dtype, else a :class:`CudaArray`.

    Where the agent cannot have the GPU's memory open, a torch tensor is one of torch's own.

    Raises:
        ArenaExhausted: the GPU has no memory left.
        InvalidArgument: there is no arena on the GPU for anything but torch.
    """
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    sizes = tuple(shape)
    if not gpu.shares_memory:
        if is_torch:
            return torch.empty(sizes, dtype=dtype, device=f"cuda:{gpu.ordinal}")
        raise InvalidArgument(
            f"no arena on cuda:{gpu.ordinal}, because {gpu.why}; allocate with your own library"
        )
    if not is_torch:
        return CudaArray(gpu, sizes, dtype)
    bytes_ = CudaArray(gpu, (prod(sizes) * itemsize_of(dtype),), np.uint8)
    return torch.as_tensor(bytes_, device=f"cuda:{gpu.ordinal}").view(dtype).reshape(sizes)


def ordinal_of_device(device: Any) -> int | None:
    """The number of a CUDA device that a user names as torch does; ``None`` for the host."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or (number and not number.isdigit()):
        raise InvalidArgument(f"device= is 'cpu', 'cuda' or 'cuda:<number>', got {device!r}")
    if number:
        return int(number)
    torch: Any = sys.modules.get("torch")
    return (
        int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0
    )
