"""Blocking on a word of shared memory, and the barriers that the agent relies on (Linux)."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_FUTEX, _MEMBARRIER = 202, 324  # of x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_REGISTER_GLOBAL_EXPEDITED = 1 << 2


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=64)
def _timespec(microseconds: int) -> _Timespec:
    seconds, rest = divmod(microseconds, 1_000_000)
    return _Timespec(seconds, rest * 1000)


def wait(address: ctypes.c_void_p, value: int, microseconds: int) -> None:
    """Block while the low 32 bits of a word are those of ``value``; for so long at most.

    It may return early, for no reason. Other threads of this process run meanwhile.
    """
    low = ctypes.c_uint32(value & 0xFFFFFFFF)
    _syscall(_FUTEX, address, _WAIT, low, ctypes.byref(_timespec(microseconds)), None, 0)


def wake(address: ctypes.c_void_p) -> None:
    """Wake all that block on a word."""
    _syscall(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


@lru_cache(maxsize=1)
def why_not() -> str:
    """Register this process for ``membarrier``; return why it cannot use the lane, if so.

    Plain stores are ordered on x86-64 only. With ``membarrier`` the agent makes them visible.
    """
    if platform.machine() != "x86_64":
        return f"stores are not ordered on {platform.machine()}"
    if _syscall(_MEMBARRIER, _REGISTER_GLOBAL_EXPEDITED, 0, 0):
        return f"membarrier: {os.strerror(ctypes.get_errno())}"
    return ""
