"""Memory of the host that GPUs reach: the segments of ranks without a GPU, and work buffers."""

from __future__ import annotations

import mmap
import weakref
from functools import partial

from allfold_agent.gpu import device
from allfold_agent.gpu.device import Device
from allfold_agent.runtime.locks import make_rlock
from allfold_agent.runtime.mapping import MappedMemory


class Pins:
    """Page-locked memory. It stays locked as long as it is mapped, because locking takes long."""

    def __init__(self) -> None:
        # The garbage collector may release some while more is taken.
        self._lock = make_rlock("gpu pins")
        self._offsets: weakref.WeakKeyDictionary[MappedMemory, int] = weakref.WeakKeyDictionary()

    def address(self, mapping: MappedMemory, gpu: Device) -> int:
        """Return the address of mapped memory for GPUs."""
        with self._lock:
            offset = self._offsets.get(mapping)
            if offset is None:
                with gpu.current():
                    offset = device.register(mapping.address, len(mapping)) - mapping.address
                self._offsets[mapping] = offset
                end = weakref.finalize(mapping, _release, mapping.memory, mapping.address, gpu)
                end.atexit = False
            return mapping.address + offset


def _release(memory: mmap.mmap, address: int, gpu: Device) -> None:
    gpu.releases.later(partial(_unlock, memory, address, gpu))


def _unlock(_memory: mmap.mmap, address: int, gpu: Device) -> None:
    """Unlock page-locked memory; the reference to it keeps it mapped until then."""
    with gpu.current():
        device.unregister(address)
