"""Keys by which repeated calls are recognised, so that they are checked and described only once.

A key has the type, dtype, shape and layout of each tensor; not its values, and not its address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from allfold_core.operations import ReduceOp

Likeness = tuple[Any, ...]

# Values that stand for themselves: what is equal to one of them means the same.
_PLAIN = frozenset({str, type(None), ReduceOp})
# Options that are no part of what a call is.
_APART = frozenset({"timeout", "async_op"})


def likeness(
    function: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]
) -> Likeness | None:
    """Return what calls have in common that are alike; ``None`` of one that is unlike any other.

    Args:
        function: the collective.
        given, named: its arguments.
    """
    parts: list[Any] = [function, len(given)]  # a name is no value
    for each in given:
        kind = type(each)
        if kind is np.ndarray:
            parts.append((each.dtype, each.shape, each.flags.num))
        elif kind in _PLAIN:
            parts.append(each)
        elif (part := _part(each)) is not None:
            parts.append(part)
        else:
            return None
    for name, each in named.items():
        if name in _APART:
            continue
        if type(each) in _PLAIN:
            parts += (name, each)
        elif (part := _part(each)) is not None:
            parts += (name, part)
        else:
            return None
    return tuple(parts)


def _part(given: Any) -> Hashable | None:
    """Return what is alike of one argument; ``None`` if nothing can be said."""
    kind: Any = type(given)
    describe = _describer(kind)
    return None if describe is None else describe(given)


@lru_cache(maxsize=256)
def _describer(kind: Any) -> Callable[[Any], Hashable | None] | None:
    if kind is np.ndarray:
        return _of_array
    if kind in _PLAIN:
        return _itself
    if kind in (int, float):
        return _of_number
    if kind in (list, tuple):
        return _of_sequence
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _describer_of_torch(torch.strided)
    return None


def _itself(given: Hashable) -> Hashable:
    return (type(given), given)


def _of_array(array: np.ndarray[Any, Any]) -> Hashable:
    return array.dtype, array.shape, array.flags.num


def _of_number(number: float) -> Hashable:
    """A number with its type: True equals 1, and is no rank."""
    return type(number), number


def _of_sequence(given: Sequence[Any]) -> Hashable | None:
    parts: list[Any] = [list]
    for each in given:
        if (part := _part(each)) is None:
            return None
        parts.append(part)
    return tuple(parts)


def _describer_of_torch(strided: Any) -> Callable[[Any], Hashable | None]:
    def describe(tensor: Any) -> Hashable | None:
        """Describe a plain tensor of the host, which lies there as it looks."""
        if (
            tensor.layout is not strided
            or not tensor.is_cpu
            or tensor.is_nested
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        return tensor.dtype, tensor.shape

    return describe
