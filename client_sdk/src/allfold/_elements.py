"""The elements of arrays and torch tensors, as types that Allfold knows."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from allfold_core.dtypes import LONGEST_ALIAS, NO_ALIAS, Alias, DType
from allfold_core.errors import InvalidArgument


class Element(NamedTuple):
    """An element of a tensor as Allfold sees it: type, inner shape and bytes.

    Attributes:
        dtype: of the elements that travel.
        inner: so many of them make up one of the caller's, where it is another type.
        itemsize: of one of the caller's.
        alias: the caller's type, where it is another one.
    """

    dtype: DType
    inner: tuple[int, ...]
    itemsize: int
    is_complex: bool
    alias: Alias = NO_ALIAS

    @property
    def label(self) -> str:
        """The name of the caller's type."""
        return self.alias.label(self.dtype)


@lru_cache(maxsize=256)
def element_of_array(dtype: np.dtype[Any], folded: bool) -> Element:
    if dtype.hasobject:
        raise InvalidArgument(f"the array holds Python objects ({dtype}), not numbers")
    if not dtype.isnative:
        raise InvalidArgument(
            f"the array ({dtype}) is not in this machine's byte order; use "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    return _element(_name_of(dtype), dtype.itemsize, folded)


@lru_cache(maxsize=256)
def element_of_torch(dtype: Any, folded: bool) -> Element:
    return _element(str(dtype).removeprefix("torch."), dtype.itemsize, folded)


_SHOWN = 32
_COMPLEX = {"complex64": DType.FLOAT32, "complex128": DType.FLOAT64}


def _element(label: str, itemsize: int, folded: bool) -> Element:
    if label in _COMPLEX:
        return Element(_COMPLEX[label], (2,), itemsize, True, Alias(label, 2))
    try:
        return Element(DType.from_label(label), (), itemsize, False)
    except ValueError as error:
        if folded:
            raise InvalidArgument(str(error)) from None
        is_complex, alias = label.startswith("complex"), Alias(label, itemsize)
        return Element(DType.UINT8, (itemsize,), itemsize, is_complex, alias)


def _name_of(dtype: np.dtype[Any]) -> str:
    """Return a name that two types share only if they are the same, however many fields they have.

    NumPy itself calls all records of one size the same.
    """
    name = dtype.name if dtype.fields is None else str(dtype)
    if len(name.encode()) <= LONGEST_ALIAS:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{dtype.name[:_SHOWN]}#{digest}"


# NumPy has no bfloat16: its elements are the upper halves of those of float32.
_STORED_AS = {DType.BFLOAT16: np.dtype(np.uint16)}


def stored_as(dtype: DType) -> np.dtype[Any]:
    """Return the type in which NumPy has elements of a type."""
    return _STORED_AS.get(dtype) or np.dtype(dtype.label)


def itemsize_of(dtype: Any) -> int:
    """Return the bytes of an element of a NumPy or torch dtype (or NumPy's name of one)."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return int(dtype.itemsize)
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgument(f"{dtype!r} is not a dtype of NumPy or torch: {error}") from None
    if found.hasobject:
        raise InvalidArgument(f"an array of {found} holds Python objects, not numbers")
    return found.itemsize
