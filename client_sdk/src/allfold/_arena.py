"""The arena: shared memory of this rank, in which its agent reads inputs and writes results.

It consists of segments. Each is a memfd that is handed to the agent over the local socket: no
name, so nothing is left behind, and no ``/dev/shm`` whose size could be too small. Arenas in the
memory of GPUs are made in :mod:`allfold._cuda`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from allfold._process.fork_memory import separate_in_children
from allfold_core.errors import ArenaExhausted
from allfold_core.protocol.rank_messages import Region

ALIGNMENT = 64
# All of it is taken from the machine before the first op, of which 2 MiB took 1 to 2 ms.
FIRST_SEGMENT = 256 << 10
LARGEST_GROWTH = 256 << 20
GRANULE = 2 << 20  # huge pages, and what GPUs share their memory in
_MADV_POPULATE_WRITE = 23

Bytes = npt.NDArray[np.uint8]
Share = Callable[[int, int, int], None]


class Memory(Protocol):
    """The memory that a segment consists of.

    Attributes:
        size: in bytes.
        address: where it begins, for whoever can reach it.
        bytes: the same memory as an array; ``None`` where only a GPU reaches it.
    """

    size: int
    address: int
    bytes: Bytes | None

    def close(self) -> None:
        """Release it: it is gone with the last array in it."""


Grow = Callable[[int, int], Memory]
"""Makes memory of a size, and tells the agent of it under a number: ``grow(number, size)``."""


class ArenaBlock(NamedTuple):
    """An allocated range: where the agent finds it, and where this process does."""

    region: Region
    size: int
    address: int
    memory: Bytes | None
    owner: Memory


class HostMemory:
    """A memfd, all of it taken from the machine at once.

    Forked children have a copy of their own in its place.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("allfold-arena", flags)
        try:
            os.ftruncate(self.descriptor, size)
            # The agent takes no memory that could be cut while it reads there.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(self.descriptor, size)
            self._populate()
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            raise ArenaExhausted(
                f"no memory for {size >> 20} MiB more of the arena: {error}. The arena counts as "
                "memory of this process; raise the container's memory limit or share less at once."
            ) from error
        self.bytes: Bytes | None = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.__array_interface__["data"][0]
        separate_in_children(self.bytes, self.descriptor)

    def _populate(self) -> None:
        """Take the memory now: a failure here is an error, later it would be a SIGBUS."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != 22:  # EINVAL: a kernel before 5.14
                raise
            os.posix_fallocate(self.descriptor, 0, self.size)

    def close(self) -> None:
        """Do nothing: the file is closed with the last array in it."""


def host_memory(share: Share) -> Grow:
    """Segments in the memory of the machine.

    Args:
        share: tells the agent about a new segment: (number, size, file descriptor).
    """

    def grow(number: int, size: int) -> HostMemory:
        memory = HostMemory(size)
        share(number, size, memory.descriptor)
        return memory

    return grow


class _Segment:
    """Memory and its free ranges, kept sorted and merged."""

    def __init__(self, number: int, memory: Memory) -> None:
        self.number = number
        self.memory = memory
        self._free = [(0, memory.size)]

    def allocate(self, size: int) -> int | None:
        """The offset of ``size`` free bytes (first fit), ``None`` where there are not as many."""
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, length - size)
                return start
        return None

    def free(self, start: int, size: int) -> None:
        """Give a range back, merged with its free neighbours."""
        insort(self._free, (start, size))
        index = bisect_right(self._free, (start, size)) - 1
        if index + 1 < len(self._free) and start + size == self._free[index + 1][0]:
            self._free[index] = (start, size + self._free.pop(index + 1)[1])
        if index and sum(self._free[index - 1]) == start:
            self._free[index - 1 : index + 1] = [
                (self._free[index - 1][0], self._free[index - 1][1] + self._free[index][1])
            ]

    def block(self, offset: int, nbytes: int) -> ArenaBlock:
        memory = self.memory
        inside = None if memory.bytes is None else memory.bytes[offset : offset + nbytes]
        return ArenaBlock(
            Region(self.number, offset), nbytes, memory.address + offset, inside, memory
        )


class Arena:
    """Allocates shared memory in segments that grow as needed.

    Args:
        grow: makes them.
        numbers: theirs; those of several arenas of one process come from one counter.
        first: the size of the first one, in bytes.
    """

    def __init__(
        self, grow: Grow, numbers: Iterator[int] | None = None, first: int = FIRST_SEGMENT
    ) -> None:
        self._new = grow
        self._numbers = count() if numbers is None else numbers
        self._first = first
        self._segments: dict[int, _Segment] = {}
        self._freed: deque[ArenaBlock] = deque()
        self._lock = Lock()
        self._closed = False

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Memory for ``nbytes`` (at least one), until :meth:`free`.

        Raises:
            ArenaExhausted: the machine, the container or the GPU has no memory left.
        """
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._take_back()
            for segment in self._segments.values():
                offset = segment.allocate(size)
                if offset is not None:
                    return segment.block(offset, nbytes)
            segment = self._grow(size)
            offset = segment.allocate(size)
            assert offset is not None
            return segment.block(offset, nbytes)

    def free(self, block: ArenaBlock) -> None:
        """Give a block back.

        The garbage collector may call this at any moment, also in a thread that is allocating: so
        it takes no lock, and the next allocation does the rest.
        """
        if not self._closed:
            self._freed.append(block)

    def _take_back(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            size = -(-max(block.size, 1) // ALIGNMENT) * ALIGNMENT
            self._segments[block.region.segment].free(block.region.offset, size)

    def array(self, nbytes: int) -> Bytes:
        """Like :meth:`allocate`, freed when the last view of the array is gone."""
        block = self.allocate(nbytes)
        assert block.memory is not None
        # Through a memoryview, so that views refer to this very array and keep it alive.
        owner: Bytes = np.frombuffer(block.memory.data, np.uint8)
        self.free_with(owner, block)
        return owner

    def free_with(self, owner: object, block: ArenaBlock) -> None:
        """Give a block back when ``owner`` is gone.

        A finalizer is kept as long as its object is: one that kept the arena, too, would keep all
        that the arena's session knows of, and if that is an error of a call, its tensor.
        """
        weakref.finalize(owner, _give_back, weakref.ref(self), block).atexit = False

    def locate(self, address: int, nbytes: int) -> Region | None:
        """The region of memory that lies in the arena, ``None`` for any other memory."""
        for segment in list(self._segments.values()):
            offset = address - segment.memory.address
            if offset >= 0 and offset + nbytes <= segment.memory.size:
                return Region(segment.number, offset)
        return None

    def close(self) -> None:
        """Release the memory: all of it is gone with the last array in it."""
        self._closed = True
        for segment in self._segments.values():
            segment.memory.close()
        self._segments.clear()
        self._freed.clear()

    def _grow(self, size: int) -> _Segment:
        held = sum(segment.memory.size for segment in self._segments.values())
        wanted = max(size, min(max(held, self._first), LARGEST_GROWTH))
        number = next(self._numbers)
        granule = GRANULE if wanted >= GRANULE else FIRST_SEGMENT
        segment = _Segment(number, self._new(number, -(-wanted // granule) * granule))
        self._segments[number] = segment
        return segment


def _give_back(arena: weakref.ref[Arena], block: ArenaBlock) -> None:
    if (owner := arena()) is not None:
        owner.free(block)
