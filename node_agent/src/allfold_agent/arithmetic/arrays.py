"""The elements of ops, as arrays over raw memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from allfold_core.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

ARRAY_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype("int16" if dtype is DType.BFLOAT16 else dtype.label) for dtype in DType
}
"""The types of elements in arrays; those of bfloat16, which NumPy has not, are their bits."""


def overlap(one: Array, other: Array) -> bool:
    """Return True if two contiguous arrays share bytes."""
    return np.may_share_memory(one, other)


def copy(out: Array, source: Array) -> None:
    """Copy elements, unless they are there already: as of a rank whose op is in place."""
    if out is source or (overlap(out, source) and out.ctypes.data == source.ctypes.data):
        return
    out[...] = source
