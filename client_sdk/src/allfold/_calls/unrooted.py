"""A broadcast without a named root: the ranks find the one that brought a tensor.

Each rank makes a record: a flag for every rank, its own set if it brought a tensor, then what that
tensor looks like, in numbers. The sum of all records says who brought one, and describes it if it
is the only one.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from allfold import _tensors
from allfold._calls.call import CallerSeat
from allfold_core.errors import BroadcastMultipleTensors, BroadcastNoTensor, InvalidArgument
from allfold_core.operations import MAX_DIMENSIONS
from allfold_core.verdict import counted

_LONGEST_NAME = 32
_TORCH_ON_GPU = 2
ABOUT_SIZE = 3 + _LONGEST_NAME + MAX_DIMENSIONS
"""Numbers in what :func:`describe` makes."""


def describe(tensor: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Describe a tensor in numbers, so that another rank can make one like it.

    Raises:
        InvalidArgument: it is not one that Allfold can move, or its type has no name.
    """
    seen = _tensors.view(tensor, written=False, folded=False)
    name = str(tensor.dtype).removeprefix("torch.") if seen.is_torch else tensor.dtype.str
    if len(name) > _LONGEST_NAME or (not seen.is_torch and np.dtype(name) != tensor.dtype):
        raise InvalidArgument(f"the type {tensor.dtype} has no name that another rank would know")
    shape = tuple(tensor.shape)
    about = np.zeros(ABOUT_SIZE, np.int64)
    kind = _TORCH_ON_GPU if seen.is_torch and seen.gpu is not None else int(seen.is_torch)
    about[:3] = (kind, len(name), len(shape))
    about[3 : 3 + len(name)] = list(name.encode("ascii"))
    about[3 + _LONGEST_NAME : 3 + _LONGEST_NAME + len(shape)] = shape
    return about


def described(about: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """Make a tensor like the one that was described; ``None`` where none was.

    A torch tensor where torch is loaded and it was one, on the current GPU where there is one and
    it was on one; else an array.
    """
    kind, length, ndim = (int(value) for value in about[:3])
    if not length:
        return None
    name = bytes(about[3 : 3 + length].astype(np.uint8)).decode("ascii")
    shape = tuple(int(size) for size in about[3 + _LONGEST_NAME : 3 + _LONGEST_NAME + ndim])
    torch = sys.modules.get("torch")
    if kind and torch is not None:
        on_gpu = kind == _TORCH_ON_GPU and torch.cuda.is_available()
        return torch.empty(shape, dtype=getattr(torch, name), device="cuda" if on_gpu else "cpu")
    try:
        return np.empty(shape, np.dtype(name))
    except TypeError:
        raise InvalidArgument(
            f"the tensor is {name}, which NumPy lacks: import torch first"
        ) from None


Record = np.ndarray[Any, np.dtype[np.int64]]


def record_of(seat: CallerSeat, tensor: Any) -> tuple[Record, InvalidArgument | None]:
    """This rank's record, and what is wrong with its tensor.

    The others wait for the record even of a tensor that cannot be moved, and must hear of it.
    """
    flags = np.zeros(seat.world_size, np.int64)
    about = np.zeros(ABOUT_SIZE, np.int64)
    unfit: InvalidArgument | None = None
    if tensor is not None:
        flags[seat.rank] = 1
        try:
            about = describe(tensor)
        except InvalidArgument as error:
            unfit = error
    return np.concatenate([flags, about]), unfit


def source_in(seat: CallerSeat, total: Record) -> int:
    """The one rank that brought a tensor, from the sum of all records."""
    sources = np.flatnonzero(total[: seat.world_size]).tolist()
    if not sources:
        raise BroadcastNoTensor(
            f"broadcast in group '{seat.group}': none of {counted(seat.world_size, 'rank')} "
            "brought a tensor; exactly one must, or all must name the root"
        )
    if len(sources) > 1:
        raise BroadcastMultipleTensors(
            f"broadcast in group '{seat.group}': ranks {sources} brought a tensor; "
            "exactly one must, or all must name the root",
            ranks=sources,
        )
    return int(sources[0])


def new_target(seat: CallerSeat, total: Record, source: int) -> Any:
    """A tensor like that of the source, for a rank that brought none."""
    tensor = described(total[seat.world_size :])
    if tensor is None:
        raise InvalidArgument(
            f"broadcast in group '{seat.group}': rank {source} brought something that "
            "cannot be moved; its own error says why"
        )
    return tensor
