"""The contents of tensors, from which a result tells exactly who took part in it.

The seat s brings a pattern of small whole numbers times 2**s; of more than 16 seats, s modulo 16. A
sum is then the pattern times the mask of those who took part, and every dtype in use holds it
exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MOST_SEATS = 16
_PERIOD = 5


@dataclass(frozen=True)
class Reading:
    """The content of a result: the mask of the seats in it, and True if all elements are right."""

    mask: int
    exact: bool


def pattern(number: int, numel: int, dtype: str, start: int = 0) -> Array:
    """Return the elements from ``start`` on of the pattern of an op."""
    return ((np.arange(start, start + numel) + number) % _PERIOD + 1).astype(dtype)


def of_seat(seat: int, number: int, numel: int, dtype: str) -> Array:
    """Return the tensor that a seat brings to an op."""
    found: Array = pattern(number, numel, dtype) * np.array(1 << seat % MOST_SEATS, dtype)
    return found


def read(result: Array, number: int, start: int = 0) -> Reading:
    """Read a sum, or a tensor that was only moved: its mask has one seat."""
    expected = pattern(number, len(result), str(result.dtype), start)
    mask = int(result[0] / expected[0])
    exact = 0 < mask < 1 << MOST_SEATS
    return Reading(mask, exact and bool(np.array_equal(result, expected * np.array(mask))))


def read_one(result: Array, number: int) -> Reading:
    """Read a tensor that must be that of a single seat."""
    found = read(result, number)
    return Reading(found.mask, found.exact and found.mask.bit_count() == 1)


def read_blocks(result: Array, number: int, blocks: int, *, ordered: bool = True) -> Reading:
    """Read the blocks of an all-gather: each of another seat, in the order of the seats.

    Args:
        ordered: False if ranks are in the order in which they have joined, whatever their seats.
    """
    found = [read_one(block, number) for block in np.split(result, blocks)]
    masks = [each.mask for each in found]
    right = masks == sorted(set(masks)) if ordered else len(masks) == len(set(masks))
    return Reading(sum(set(masks)), right and all(each.exact for each in found))


def digest(arrays: Sequence[Array]) -> str:
    """Return a short digest of the bytes of arrays."""
    found = hashlib.blake2b(digest_size=8)
    for each in arrays:
        found.update(np.ascontiguousarray(each).view(np.uint8).data)
    return found.hexdigest()
