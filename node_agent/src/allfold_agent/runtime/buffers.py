"""Work buffers: counted, pooled, page-aligned memory that outlives the op as long as needed."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from time import monotonic

import numpy as np

from allfold_agent.runtime.locks import make_lock


class MappedMemory:
    """Mapped memory of this process.

    What has to happen before it is unmapped is a finalizer of this object that keeps ``memory``: by
    the time that finalizers of an ``mmap`` run, something else may have got the address.

    Attributes:
        address: where it begins.
    """

    __slots__ = ("__weakref__", "address", "memory")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)

    def __len__(self) -> int:
        return len(self.memory)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as there are; other threads run meanwhile, which a view would keep."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class SharedFile:
    """A file in memory that other agents of this machine may read.

    Attributes:
        file: its descriptor, closed with the last reference to this; ``None`` if there is none.
        serial: no other one ever has it.
    """

    __slots__ = ("__weakref__", "file", "serial")

    def __init__(self, file: int | None) -> None:
        self.serial = next(_serials)
        self.file = file
        if file is not None:
            weakref.finalize(self, os.close, file)

    @classmethod
    def read_only(cls, descriptor: int) -> SharedFile:
        """Return one of the same file as a descriptor, for reading alone."""
        try:
            return cls(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            log.warning("memory is not shared with agents of this machine: %s", error)
            return cls(None)


log = logging.getLogger(__name__)

SMALLEST = 64 * 1024
HUGE_PAGE = 2 * 1024 * 1024
# Smaller ones are copied in less time than it takes to map them.
SHARED_BYTES = 1024 * 1024
LATELY_SECONDS = 5.0

_serials = count()
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

Later = Callable[[float, Callable[[], None]], None]


def is_sealed(descriptor: int) -> bool:
    """Return True if a file cannot be cut: whoever cuts memory that others map kills them."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def size_class(nbytes: int) -> int:
    """Return the size of the buffers that serve ``nbytes``: at most an eighth more, whole pages.

    There are eight sizes between two powers of two, so that ops of similar size share buffers.
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


class Buffer:
    """A range of memory that goes back to its pool when its last holder releases it.

    Attributes:
        mapping: what it is.
        view: the same, as bytes.
        file: of one that is shared, the descriptor of the file that the memory is; agents of the
            same machine can map it.
        serial: no other one ever has it.
        idle_since: when its last holder released it.
    """

    def __init__(self, pool: BufferPool, size: int, shared: bool) -> None:
        self.size = size
        self.shared = shared
        self.serial = next(_serials)
        self.file: int | None = None
        self.idle_since = 0.0
        self._pool = pool
        self._holders = 0
        memory = self._map(size) if shared else mmap.mmap(-1, size)
        self.mapping = MappedMemory(memory)
        if size >= HUGE_PAGE:
            # A fresh 64 MiB in 4 KiB pages costs more time in page faults than its fold does.
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)

    def _map(self, size: int) -> mmap.mmap:
        """A file in memory; plain memory where no descriptors are left."""
        try:
            self.file = os.memfd_create("allfold-work", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            return mmap.mmap(self.file, size)
        except OSError as error:
            log.warning("a work buffer is no file, so it is sent with copies: %s", error)
            self.file = None
            return mmap.mmap(-1, size)

    def discard(self) -> None:
        """Give the memory back to the system, also where another agent still has it mapped."""
        if self.file is not None:
            self.mapping.memory.madvise(mmap.MADV_REMOVE)

    def hold(self) -> Buffer:
        """Add a holder; every ``hold`` needs one :meth:`release`."""
        with self._pool.lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder; without any the memory is used for another op."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders == 0:
                self._pool.give_back(self)


class BufferPool:
    """Buffers by size class (:func:`size_class`).

    Fresh memory costs more time in page faults than an op on it does. So what was used lately is
    kept, however much it is; of what was not, at most ``keep`` bytes are.

    Args:
        keep: bytes.
        later: does something after some seconds, in any thread.
    """

    def __init__(self, keep: int, later: Later) -> None:
        self.lock = make_lock("buffers")
        self._keep = keep
        self._later = later
        self._idle: dict[tuple[int, bool], list[Buffer]] = defaultdict(list)
        self._idle_bytes = 0
        self._held_bytes = 0
        self._will_trim = False

    def take(self, nbytes: int, *, shared: bool = False) -> Buffer:
        """A buffer of at least ``nbytes`` with one holder. Its content is arbitrary.

        Args:
            shared: whether other agents of this machine should be able to read it where it is, if
                it is large. That costs descriptors, of which a process has few.
        """
        size = size_class(nbytes)
        kind = size, shared and size >= SHARED_BYTES
        with self.lock:
            idle = self._idle[kind]
            self._held_bytes += size
            if idle:
                self._idle_bytes -= size
                buffer = idle.pop()
                buffer._holders = 1
                return buffer
        try:
            return Buffer(self, *kind).hold()
        except BaseException:
            with self.lock:
                self._held_bytes -= size
            raise

    @property
    def held_bytes(self) -> int:
        """The memory of buffers that have a holder."""
        return self._held_bytes

    @property
    def idle_bytes(self) -> int:
        """The memory of buffers that wait for their next use."""
        return self._idle_bytes

    def give_back(self, buffer: Buffer) -> None:
        """Keep an unheld buffer. Called with the lock held."""
        buffer.idle_since = monotonic()
        self._held_bytes -= buffer.size
        self._idle_bytes += buffer.size
        self._idle[buffer.size, buffer.shared].append(buffer)
        if self._idle_bytes > self._keep and not self._will_trim:
            self._will_trim = True
            self._later(LATELY_SECONDS, self._trim)

    def _trim(self) -> None:
        """Release what has not been used lately, the longest idle first."""
        with self.lock:
            self._will_trim = False
            # The list holds them until the lock is free: to unmap them takes milliseconds.
            everything = [each for idle in self._idle.values() for each in idle]
            everything.sort(key=lambda each: each.idle_since)
            for buffer in everything:
                if self._idle_bytes <= self._keep:
                    break
                left = buffer.idle_since + LATELY_SECONDS - monotonic()
                if left > 0:
                    self._will_trim = True
                    self._later(left, self._trim)
                    break
                self._idle[buffer.size, buffer.shared].remove(buffer)
                self._idle_bytes -= buffer.size
                buffer.discard()
