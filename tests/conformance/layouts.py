"""Tensors of every memory layout, each inside a base whose other elements must stay as they are.

Used inside workers. A layout makes a view of the given shape over a base that is full of
:data:`FILLER`; with the view overwritten, whatever else changed in the base is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import allfold

FILLER = 99
SHAPE = (4, 6)

# A base and the view of SHAPE into it, for a group (whose arena may be used).
Layout = Callable[[allfold.Group], tuple[Any, Any]]


def _numpy(shape: tuple[int, ...], order: Any = "C") -> Any:
    return np.full(shape, FILLER, np.float32, order)


def _torch(*shape: int) -> Any:
    import torch

    return torch.full(shape, float(FILLER))


def _arena(group: allfold.Group, *shape: int, torch: bool = False) -> Any:
    dtype: Any = np.float32
    if torch:
        import torch as library

        dtype = library.float32
    tensor = group.empty(shape, dtype)
    tensor[...] = FILLER
    return tensor


def _whole(base: Any) -> tuple[Any, Any]:
    return base, base


def _inner(base: Any) -> tuple[Any, Any]:
    return base, base[2:6, 1:7]


def _rows(base: Any) -> tuple[Any, Any]:
    return base, base[3:7]


def _strided(base: Any) -> tuple[Any, Any]:
    return base, base[1::2, ::3]


def _backwards(base: Any) -> tuple[Any, Any]:
    return base, base[::-1, ::-1]


def _turned(base: Any) -> tuple[Any, Any]:
    return base, base.T


def _parameter() -> tuple[Any, Any]:
    import torch

    parameter = torch.nn.Parameter(_torch(*SHAPE))
    return parameter.detach(), parameter


LAYOUTS: dict[str, Layout] = {
    "numpy": lambda group: _whole(_numpy(SHAPE)),
    "numpy Fortran order": lambda group: _whole(_numpy(SHAPE, "F")),
    "numpy transposed": lambda group: _turned(_numpy((6, 4))),
    "numpy inner": lambda group: _inner(_numpy((8, 8))),
    "numpy strided": lambda group: _strided(_numpy((9, 18))),
    "numpy negative strides": lambda group: _backwards(_numpy(SHAPE)),
    "torch": lambda group: _whole(_torch(*SHAPE)),
    "torch transposed": lambda group: _turned(_torch(6, 4)),
    "torch inner": lambda group: _inner(_torch(8, 8)),
    "torch strided": lambda group: _strided(_torch(9, 18)),
    "torch parameter": lambda group: _parameter(),
    "arena": lambda group: _whole(_arena(group, *SHAPE)),
    "arena rows": lambda group: _rows(_arena(group, 9, 6)),
    "arena inner": lambda group: _inner(_arena(group, 8, 8)),
    "arena negative strides": lambda group: _backwards(_arena(group, *SHAPE)),
    "arena torch": lambda group: _whole(_arena(group, *SHAPE, torch=True)),
    "arena torch rows": lambda group: _rows(_arena(group, 9, 6, torch=True)),
    "arena torch transposed": lambda group: _turned(_arena(group, 6, 4, torch=True)),
}


def make(group: allfold.Group, name: str, values: Any) -> tuple[Any, Any, int]:
    """A base and its view, with ``values`` in it; and how many fillers are around it."""
    base, view = LAYOUTS[name](group)
    plain = view.detach() if hasattr(view, "detach") else view
    if isinstance(view, np.ndarray):
        plain[...] = values
    else:
        import torch

        plain.copy_(torch.from_numpy(values))
    return base, view, fillers(base)


def fillers(base: Any) -> int:
    return int((base == FILLER).sum())


def as_array(view: Any) -> Any:
    """The elements as a NumPy array, whoever's tensor it is."""
    return view if isinstance(view, np.ndarray) else view.detach().numpy()
