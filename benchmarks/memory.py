"""The memory of a library beside the tensors: one library at a time, in fresh processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from benchmarks.conductor import Budget
from benchmarks.loopback import loopback
from benchmarks.plan import MIB, Case, Shape
from benchmarks.results import Memory
from benchmarks.usage import memory_bytes

CASE = Case("all_reduce", 64 * MIB)
SHAPES = ("1x4", "2x2")
_SMALL = Case("all_reduce", 4096)
_OPS = 3
_LOOK_AGAIN_SECONDS = 0.01


def measure(shape: Shape, library: str) -> Memory:
    """The growth while the library reduces the first large tensors of its life."""
    with loopback(shape, [library], Budget()) as conductor:
        with conductor.prepared(_SMALL):  # opens connections
            conductor.sample(library, _OPS)
        with conductor.prepared(CASE):
            conductor.write(library)
            before = memory_bytes(conductor.pids)
            with Peak(conductor.pids) as peak:
                for _ in range(_OPS):
                    conductor.run(library, 1)
            kept = memory_bytes(conductor.pids)
    return Memory(shape, CASE, library, max(peak.bytes, kept) - before, kept - before)


class Peak(AbstractContextManager["Peak"]):
    """The most memory that the processes have while this is entered."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self._pids = pids
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_AGAIN_SECONDS):
            self.bytes = max(self.bytes, memory_bytes(self._pids))
