"""Words of memory that is shared with other processes: who sees a store, and who waits for it.

Of x86-64, where plain stores of one processor are seen in their order.
"""

from __future__ import annotations

import ctypes
import platform
from functools import lru_cache

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
