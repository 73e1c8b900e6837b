"""Proof that memory which a rank shares is what the rank says."""

from __future__ import annotations

import mmap
from queue import SimpleQueue

from allfold_agent.gpu.device import RankMemory
from allfold_agent.gpu.pins import Pins
from allfold_agent.runtime.mapping import MappedMemory
from allfold_core.errors import GpuFailed

_PATIENCE_SECONDS = 10.0


def begins_with(memory: RankMemory, proof: bytes, pins: Pins) -> bool:
    """Return true if these bytes, one page at most, are at the beginning of a GPU's memory.

    Raises:
        GpuFailed: the GPU refuses to look, or does not come to it for some seconds.
    """
    device, page = memory.device, MappedMemory(mmap.mmap(-1, mmap.PAGESIZE))
    with device.current():
        device.copy(pins.address(page, device), memory.address, len(proof))
        copied = device.mark()
    told: SimpleQueue[Exception | None] = SimpleQueue()

    def then(error: Exception | None, _used: object = (memory, page)) -> None:
        told.put(error)

    device.completions.add(copied, then, _PATIENCE_SECONDS)
    error = told.get(timeout=2 * _PATIENCE_SECONDS)  # it comes in half of it, whatever happens
    if isinstance(error, TimeoutError):
        raise GpuFailed(f"{device.name.name} is busy for {_PATIENCE_SECONDS:g} s now") from error
    if error is not None:
        raise error
    return page.memory[: len(proof)] == proof
