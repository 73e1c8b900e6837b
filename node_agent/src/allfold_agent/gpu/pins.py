"""Memory of the host that GPUs reach: the segments of ranks without a GPU, and work buffers."""

from __future__ import annotations

import mmap
import weakref
from functools import partial
from threading import RLock

from allfold_agent.gpu import device
from allfold_agent.gpu.device import Device
from allfold_agent.mapped import Mapped


class Pins:
    """What is page-locked. It stays so as long as it is mapped, because to do it takes long."""

    def __init__(self) -> None:
        self._lock = RLock()  # the garbage collector may release some while more is taken
        self._offsets: weakref.WeakKeyDictionary[Mapped, int] = weakref.WeakKeyDictionary()

    def address(self, mapping: Mapped, gpu: Device) -> int:
        """Where GPUs find mapped memory."""
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
    """Unlock what is about to be unmapped; has the memory, so that it is not unmapped before."""
    with gpu.current():
        device.unregister(address)
