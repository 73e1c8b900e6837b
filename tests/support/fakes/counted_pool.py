"""A pool of buffers that counts those that are held."""

from __future__ import annotations

from allfold_agent.runtime.buffers import Buffer, BufferPool
from tests.support.waiting import never


class CountedPool(BufferPool):
    """Knows how many of its buffers are held by somebody."""

    def __init__(self) -> None:
        super().__init__(1 << 30, never)
        self.held = 0

    def take(self, nbytes: int, *, shared: bool = False) -> Buffer:
        buffer = super().take(nbytes, shared=shared)
        with self.lock:
            self.held += 1
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self.held -= 1
        super().give_back(buffer)
