"""The GPU of a child process, with an agent that only listens."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from allfold._arena import GRANULE, ArenaBlock
from allfold._cuda.gpu import AgentAccess, Gpu
from allfold._cuda.memory import PinnedMemory
from allfold_core.errors import GpuFailed, InvalidArgument
from allfold_core.wire.local_wire import FENCE_WORD, Fence

with suppress(ImportError):  # each test says that it needs them
    from cuda.bindings import driver

    from tests.support.fakes.fake_cuda.arrays import check


SECONDS = 30.0
FIRST = 32 << 20
"""The first segment on a GPU, in bytes."""

NO_GPU = "the agent folds on no GPU"

kept: dict[str, Any] = {}


class Listener:
    """A stand-in for the agent's side of a session; it refuses segments where a test wants it.

    Attributes:
        words: the segments in the host's memory, as the agent sees them.
        shared: (number, size, UUID) of those on a GPU.
    """

    def __init__(self, *, refuses: bool = False, sees: bool = True) -> None:
        self.refuses = refuses
        self.words: dict[int, mmap.mmap] = {}
        self.shared: list[tuple[int, int, str]] = []
        gpus = {uuid: f"GPU {uuid}" for uuid in uuids()} if sees else {}
        self.agent = AgentAccess(gpus, NO_GPU, count(), self.share, self.share_gpu)

    def share(self, number: int, size: int, descriptor: int) -> None:
        assert os.fstat(descriptor).st_size == size
        self.words[number] = mmap.mmap(descriptor, mmap.PAGESIZE)

    def share_gpu(self, number: int, size: int, uuid: str, descriptor: int, proof: bytes) -> None:
        if self.refuses:
            raise InvalidArgument("the agent says no")
        assert len(proof) >= 16
        assert os.pread(descriptor, len(proof), 0) == proof
        assert os.fstat(descriptor).st_size == size
        self.shared.append((number, size, uuid))

    def sees_passed(self, fence: Fence) -> bool:
        memory = self.words[fence.word.segment]
        return fence.is_passed(*FENCE_WORD.unpack_from(memory, fence.word.offset))

    def close(self) -> None:
        for memory in self.words.values():
            memory.close()


class Lines(logging.Handler):
    """A log handler that keeps the level and the text of each record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append([record.levelname, record.getMessage()])


def uuids() -> list[str]:
    if driver.cuInit(0)[0]:
        return []
    newest = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    numbers = range(check(driver.cuDeviceGetCount()))
    return [bytes(check(newest(each)).bytes).hex() for each in numbers]


def logged() -> Lines:
    lines, logger = Lines(), logging.getLogger("allfold")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    logger.propagate = False
    return lines


def open_gpu(refuses: bool = False, sees: bool = True, ordinal: int = 0) -> dict[str, Any]:
    """The way, and what is logged of it."""
    lines, listener = logged(), Listener(refuses=refuses, sees=sees)
    kept["listener"] = listener
    gpu = kept["gpu"] = Gpu(ordinal, listener.agent)
    return {
        "path": gpu.path.value,
        "why": gpu.why,
        "logged": lines.lines,
        "shares": gpu.shares_memory,
        "shared": listener.shared,
        "uuids": uuids(),
    }


def opened() -> tuple[Gpu, Listener]:
    if "gpu" not in kept:
        open_gpu()
    return kept["gpu"], kept["listener"]


def use_for_copies(gpu: Gpu, nbytes: int) -> tuple[ArenaBlock, PinnedMemory, Any]:
    """A block of the arena, and page-locked memory with an array of it."""
    memory = PinnedMemory(gpu.device, GRANULE)
    assert memory.bytes is not None
    return gpu.staging.allocate(nbytes), memory, memory.bytes[:nbytes]


def await_passed(listener: Listener, fence: Fence) -> None:
    deadline = time.monotonic() + SECONDS
    while not listener.sees_passed(fence):
        assert time.monotonic() < deadline, "the GPU does not pass the fence"


def free_memory() -> int:
    with kept["gpu"].device.current():
        free, _ = check(driver.cuMemGetInfo())
    return int(free)


def held() -> dict[str, int]:
    """Count the GPU memory, descriptors and mappings of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "arenas": sum("allfold-arena" in line for line in maps),
        "shared": sum("fake_cuda_of" in line for line in maps),
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except GpuFailed as error:
        return error.message
    return "nothing"
