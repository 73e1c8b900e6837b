"""Half types: from their elements to float32, and back.

NumPy has no bfloat16, but its elements are the upper halves of those of float32. It has float16, of
which it converts one element after the other: torch takes a thirtieth of that. So the first op that
converts more than a few has a thread of its own load torch, which takes seconds. Until then, and
where there is no torch, NumPy converts. Both give the same bits, but for which NaN it is.
"""

from __future__ import annotations

import logging
from itertools import count
from threading import local, main_thread
from typing import Protocol

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.runtime.threads import start_thread
from allfold_core.dtypes import DType
from allfold_core.errors import ServiceError

log = logging.getLogger(__name__)

BLOCK = 1 << 16
"""Elements that are converted at a time, so that what is between two steps stays in caches."""

# As arrays, which NumPy takes in half the time of numbers.
_HALF_BITS = np.array(16, np.uint32)
_LAST_BIT = np.array(1, np.uint32)
_JUST_BELOW_A_HALF = np.array(0x7FFF, np.uint32)
_A_NAN = 0x7FC0
# Shorter ones NumPy converts in the time of a call of torch.
_FEW = 1024


class _Scratch(local):
    """Memory of each thread for blocks of float32: to have new memory costs more than a fold."""

    def __init__(self) -> None:
        self.bits = np.empty(BLOCK, np.uint32)
        self.values = np.empty(BLOCK, np.float32)
        self.others = np.empty(BLOCK, np.float32)


scratch = _Scratch()


class Half(Protocol):
    """A half type. Its methods take at most :data:`BLOCK` elements."""

    def widen(self, halves: Array, out: Array) -> None:
        """Write elements to ``out`` in float32: exactly."""

    def round(self, values: Array, out: Array) -> None:
        """Write float32 elements to ``out``, rounded to nearest, ties to even."""

    def narrow(self, values: Array, out: Array) -> None:
        """Do so where all of them are elements of this type, so that nothing is rounded."""


class BFloat16:
    """Given as bits."""

    def widen(self, halves: Array, out: Array) -> None:
        bits = out.view(np.uint32)
        np.copyto(bits, halves.view(np.uint16))
        np.left_shift(bits, _HALF_BITS, out=bits)

    def round(self, values: Array, out: Array) -> None:
        bits, rounded = values.view(np.uint32), scratch.bits[: len(values)]
        np.right_shift(bits, _HALF_BITS, out=rounded)
        np.bitwise_and(rounded, _LAST_BIT, out=rounded)
        np.add(rounded, _JUST_BELOW_A_HALF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, _HALF_BITS, out=rounded)
        np.copyto(out.view(np.uint16), rounded, casting="unsafe")
        if len(values) and np.isnan(values.max()):
            out[np.isnan(values)] = _A_NAN

    def narrow(self, values: Array, out: Array) -> None:
        halves = scratch.bits[: len(values)]
        np.right_shift(values.view(np.uint32), _HALF_BITS, out=halves)
        np.copyto(out.view(np.uint16), halves, casting="unsafe")


class Float16:
    """Converted by NumPy, until torch is there."""

    def __init__(self) -> None:
        self._cast = _cast
        self._calls = count()  # its next() is atomic

    def _begin_to_load(self) -> None:
        try:
            start_thread(self._load, "allfold-torch")
        except ServiceError as error:
            log.warning("float16 is converted slowly: %s", error)

    def _load(self) -> None:
        try:
            from allfold_agent.arithmetic import torch_kernels
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, NumPy goes on
            if main_thread().is_alive():  # else the agent ends meanwhile
                log.warning("float16 is converted slowly, as torch cannot be loaded: %r", error)
            return
        self._cast = torch_kernels.cast

    def widen(self, halves: Array, out: Array) -> None:
        self._convert(halves, out)

    def round(self, values: Array, out: Array) -> None:
        self._convert(values, out)

    narrow = round

    def _convert(self, source: Array, out: Array) -> None:
        if len(source) < _FEW:
            _cast(source, out)
            return
        if self._cast is _cast and not next(self._calls):
            self._begin_to_load()
        self._cast(source, out)


def _cast(source: Array, out: Array) -> None:
    np.copyto(out, source, casting="unsafe")


HALVES: dict[DType, Half] = {DType.BFLOAT16: BFloat16(), DType.FLOAT16: Float16()}
"""By type; that of float16 knows whether torch is there, for all ops."""
