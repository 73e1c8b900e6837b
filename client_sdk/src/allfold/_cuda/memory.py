"""Memory that a GPU reaches and the agent as well: what arenas for its tensors consist of."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

import numpy as np

from allfold._arena import Bytes, Grow, HostMemory, Share
from allfold._cuda.device import PATIENCE_SECONDS, CudaDevice
from allfold_core.errors import ArenaExhausted, GpuFailed

log = logging.getLogger("allfold")

_PROOF_BYTES = 16
_IS_KEPT = "memory is kept that a GPU may still use: %s"
_kept: list[PinnedMemory] = []

ShareGpu = Callable[[int, int, str, int, bytes], None]
"""Gives the agent GPU memory: (number, size, UUID of the GPU, file descriptor, what is in it)."""


class PinnedMemory(HostMemory):
    """Memory of the host that stays where it is, so that the GPU copies there by itself."""

    def __init__(self, device: CudaDevice, size: int) -> None:
        super().__init__(size)
        self._device = device
        with device.current():
            self.on_gpu = device.register(self.address, size)

    def close(self) -> None:
        """Release it, after the last copy."""
        try:
            with self._device.current():
                self._device.finish()
                self._device.unregister(self.address)
        except GpuFailed as error:
            log.error(_IS_KEPT, error.message)
            _kept.append(self)


class DeviceMemory:
    """Memory of the GPU."""

    bytes: Bytes | None = None

    def __init__(self, device: CudaDevice, size: int) -> None:
        self.address = 0
        self._device = device
        self._pid = os.getpid()
        try:
            with device.current():
                self.address, self.size, self.descriptor = device.allocate(size)
        except GpuFailed as error:
            raise ArenaExhausted(
                f"no memory for {size >> 20} MiB more of the arena on cuda:{device.ordinal} "
                f"({device.name}): {error.message}. Let the framework use less of the GPU, or set "
                "ALLFOLD_GPU_PATH=pinned."
            ) from error

    def __del__(self) -> None:
        if not self.address or self._pid != os.getpid():  # a forked process has no CUDA
            return
        try:
            with self._device.current():
                # What streams were given may still use arrays that were in it.
                self._device.wait_for_users()
                self._device.finish()
                self._device.free(self.address, self.size)
        except GpuFailed as error:
            log.error(_IS_KEPT, error.message)

    def close(self) -> None:
        """Do nothing: the segment is freed with the last array in it."""


def pinned_memory(device: CudaDevice, share: Share) -> Grow:
    """Segments of page-locked memory of the host."""

    def grow(number: int, size: int) -> PinnedMemory:
        memory = PinnedMemory(device, size)
        try:
            share(number, size, memory.descriptor)
        except BaseException:
            memory.close()
            raise
        return memory

    return grow


def device_memory(device: CudaDevice, share: ShareGpu) -> Grow:
    """Segments in the GPU's memory. The agent proves that it sees the same memory as this process.

    What a GPU is called proves nothing: what two containers call the same need not be.
    """

    def grow(number: int, size: int) -> DeviceMemory:
        memory = DeviceMemory(device, size)
        try:
            proof = _written(device, memory)
            share(number, memory.size, device.uuid, memory.descriptor, proof)
        finally:
            os.close(memory.descriptor)
        return memory

    return grow


def _written(device: CudaDevice, memory: DeviceMemory) -> bytes:
    """Return the random bytes written at the beginning of memory, which nobody else can guess."""
    proof = np.frombuffer(secrets.token_bytes(_PROOF_BYTES), np.uint8)
    source, side = proof.__array_interface__["data"][0], device.side_stream
    with device.current():
        # Our stream may have to wait for what the caller's was given.
        device.copy(memory.address, source, _PROOF_BYTES, side)
        if not device.finished_within(PATIENCE_SECONDS, side):
            raise GpuFailed(f"cuda:{device.ordinal} is busy for {PATIENCE_SECONDS:g} s now")
    return proof.tobytes()
