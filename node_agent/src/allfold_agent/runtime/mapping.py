"""Mapped memory that others register, and give up in time."""

from __future__ import annotations

import mmap

import numpy as np


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
