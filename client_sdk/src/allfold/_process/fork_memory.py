"""Forked children have memory of their own where their parent shares memory with its agent.

Of ordinary memory a fork makes a copy; shared memory stays shared, so what a child writes to its
copy of an array would be in its parent's. In the child, other memory is therefore mapped at the
same addresses, which arrays and tensors keep:

- a copy that the parent has made before the fork, if all that it shares is small;
- else the same pages copy-on-write: what the child writes is its own, but in a page to which it
  has not written, it may see what the parent or the agent writes later. The kernel takes no
  snapshot of shared memory, and a copy of large memory for each child could exhaust the machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt


class Inherited(Protocol):
    """A resource of the parent that a forked child inherits."""

    def disown(self) -> None:
        """Release the child's copy. Called in the child, which has one thread."""


_inherited: WeakSet[Inherited] = WeakSet()


def disown_in_children(inherited: Inherited) -> None:
    """Register a resource: every child that is forked from now on calls ``disown``."""
    _inherited.add(inherited)


def _disown_all() -> None:
    for each in list(_inherited):
        each.disown()


os.register_at_fork(after_in_child=_disown_all)


# To copy as much takes a few milliseconds in huge pages, and some tens of them without: most of
# that is the kernel handing out the pages.
LARGEST_SNAPSHOT = 8 << 20

_HUGE_PAGES = 14  # MADV_HUGEPAGE, which the module mmap has on some systems only
_FIXED = 0x10  # MAP_FIXED, which the module mmap does not have
_MOVED_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _mremap, _munmap, _madvise = _libc.mmap, _libc.mremap, _libc.munmap, _libc.madvise
_mmap.restype = _mremap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,  # off_t
)
_mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """A shared mapping of a whole file, and the array by which every view keeps it mapped."""

    array: weakref.ref[Bytes]
    address: int
    size: int
    descriptor: int


# By address. Only operations that are atomic: any thread may fork at any moment.
_shared: dict[int, _Shared] = {}


class _Snapshots(threading.local):
    """The copies that the fork of this thread is made with."""

    def __init__(self) -> None:
        self.made: list[tuple[_Shared, int]] = []


_snapshots = _Snapshots()


def separate_in_children(memory: Bytes, descriptor: int) -> None:
    """Give every child that is forked from now on memory of its own in place of a mapping.

    Args:
        memory: the mapping of the whole file; every view of it keeps this very array alive.
        descriptor: of the file; it is closed with the last view.
    """
    address = memory.__array_interface__["data"][0]
    _shared[address] = _Shared(weakref.ref(memory), address, memory.nbytes, descriptor)
    weakref.finalize(memory, _forget, address, descriptor).atexit = False


def _forget(address: int, descriptor: int) -> None:
    """Forget a mapping just before it ends: no child may map anything there any more."""
    _shared.pop(address, None)
    os.close(descriptor)


def _in_use() -> list[tuple[_Shared, Bytes]]:
    """The mappings, with arrays that keep other threads, and the collector, from ending them."""
    found = ((each, each.array()) for each in list(_shared.values()))
    return [(shared, array) for shared, array in found if array is not None]


def _before() -> None:
    """Copy what is shared, if it is small. Where there is no memory for a copy there is none."""
    shared = _in_use()
    if sum(each.size for each, _ in shared) > LARGEST_SNAPSHOT:
        return
    for each, _ in shared:
        copy = _anonymous(each.size)
        if copy is not None:
            ctypes.memmove(copy, each.address, each.size)
            _snapshots.made.append((each, copy))


def _anonymous(size: int) -> int | None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _mmap(None, size, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == _FAILED:
        return None
    _madvise(address, size, _HUGE_PAGES)  # where there are none it fails, and is not needed
    return int(address)


def _in_parent() -> None:
    for shared, copy in _snapshots.made:
        _munmap(copy, shared.size)
    _snapshots.made.clear()


def _in_child() -> None:
    """Replace what is shared. The replacement is private, and so it is in the child's children."""
    copies = dict(_snapshots.made)
    for shared, _ in _in_use():
        copy = copies.pop(shared, None)
        if not (_copy_on_write(shared) if copy is None else _move(copy, shared)):
            _end(shared)
    for shared, copy in copies.items():  # another thread had ended it when the fork was made
        _munmap(copy, shared.size)
    _snapshots.made.clear()
    _shared.clear()


def _move(copy: int, shared: _Shared) -> bool:
    moved = _mremap(copy, shared.size, shared.size, _MOVED_TO, shared.address)
    return bool(moved == shared.address)


def _copy_on_write(shared: _Shared) -> bool:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _FIXED
    mapped = _mmap(shared.address, shared.size, protection, flags, shared.descriptor, 0)
    return bool(mapped == shared.address)


def _end(shared: _Shared) -> None:
    """End a child that would write to the memory of its parent."""
    error = os.strerror(ctypes.get_errno())
    print(
        f"allfold: a child of process {os.getppid()} ends, because it cannot have "
        f"{shared.size >> 10} KiB of memory of its own for its arrays in shared memory: {error}. "
        "Raise the limit of memory, or start the child with 'spawn'.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
