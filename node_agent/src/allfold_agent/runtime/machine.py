"""This machine: the memory that the process may use, and how processes see each other's stores."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from pathlib import Path

from allfold_core.machine import MEMORY, Read, bounds

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int:
    """Return the bytes that the process may use: the least of the machine's and its cgroups'.

    Limits of all ancestors count, of cgroups of version 2 and 1. What cannot be read is no limit.

    Args:
        root: of the file system that has ``proc`` and ``sys``.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(each.limit for each in bounds(reader(root), MEMORY))])


def reader(root: Path = _ROOT) -> Read:
    """Return a function that reads the kernel's files, as :mod:`allfold_core.machine` wants it."""

    def read(path: str) -> str:
        try:
            return (root / path.lstrip("/")).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    return read


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_FUTEX, _MEMBARRIER = 202, 324
_WAKE, _EVERYBODY = 1, 0x7FFFFFFF
_QUERY, _GLOBAL_EXPEDITED = 0, 1 << 1


@lru_cache(maxsize=1)
def why_unordered() -> str:
    """Return why stores of other processes cannot be relied on here; ``""`` where they can."""
    if platform.machine() != "x86_64":
        return f"stores are not ordered on {platform.machine()}"
    if not max(0, _syscall(_MEMBARRIER, _QUERY, 0, 0)) & _GLOBAL_EXPEDITED:
        return "the kernel has no membarrier"
    return ""


def make_all_stores_visible() -> None:
    """Return when all stores that registered processes have made before this are in memory.

    And what they load after it is what is in memory then.
    """
    if _syscall(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0):
        raise OSError(ctypes.get_errno(), "membarrier")


def wake(address: int) -> None:
    """Wake all that block on a word."""
    _syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
