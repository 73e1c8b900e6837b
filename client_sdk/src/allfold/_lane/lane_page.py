"""A page as one of its ranks has it mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from threading import Lock

import numpy as np

from allfold._arena import Block, Bytes
from allfold._connection import Files
from allfold._lane import futex
from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.page import WORD, PageLayout


class LanePage:
    """The words and slots of a page.

    Args:
        files: that of the page; and, in a group on several nodes, the eventfd of the agent.
        layout: of the page.
        index: of this rank among those of the node.

    Attributes:
        files: those that it was made of.
        words: the words, by their index; loads and stores of one are atomic.
        bytes: the page as an array.
        address: where it begins.
    """

    def __init__(self, files: Files, layout: PageLayout, index: int) -> None:
        memory = mmap.mmap(files.descriptors[0], layout.size)
        self.files = files
        self.layout = layout
        self.index = index
        self.view = memoryview(memory)
        self.words = self.view[: layout.words * WORD].cast("Q")
        self._memory: Bytes = np.frombuffer(memory, np.uint8)
        self.bytes: Bytes | None = self._memory
        self.address: int = self._memory.ctypes.data
        self.size = layout.size
        self._fence = Lock()
        self._fenced = False

    def close(self) -> None:
        """Do nothing: the page is gone with the last array in it."""

    def wait(self, word: int, value: int, microseconds: int) -> None:
        """Block while a word has a value; for so long at most."""
        futex.wait(ctypes.c_void_p(self.address + word * WORD), value, microseconds)

    def wake(self, word: int) -> None:
        """Wake whoever blocks on a word."""
        futex.wake(ctypes.c_void_p(self.address + word * WORD))

    def wake_agent(self) -> None:
        """Wake the agent, which waits for posts."""
        os.eventfd_write(self.files.descriptors[1], 1)

    def fence(self) -> None:
        """Have what was stored before this seen by others before anything is loaded after it.

        A processor may load while its own stores are on their way. To take a lock makes it wait.
        """
        with self._fence:
            self._fenced = True  # an exception at a mere "pass" would leave the lock taken

    def inputs(self, rank: int, slot: int) -> Bytes:
        """The input of a rank's slot, as bytes."""
        start = self.layout.input_offset(rank, slot)
        return self._memory[start : start + self.layout.slot_bytes]

    def outputs(self, slot: int) -> Bytes:
        """The output of a slot of this rank, as bytes."""
        start = self.layout.output_offset(self.index, slot)
        return self._memory[start : start + self.layout.slot_bytes]

    def input_block(self, slot: int, nbytes: int) -> Block:
        """The memory in which this rank leaves its input."""
        return self._block(self.layout.input_offset(self.index, slot), nbytes)

    def output_block(self, slot: int, nbytes: int) -> Block:
        """The memory in which the agent leaves the result of an op that it has taken over."""
        return self._block(self.layout.output_offset(self.index, slot), nbytes)

    def _block(self, offset: int, nbytes: int) -> Block:
        memory = self._memory[offset : offset + nbytes]
        return Block(Region(0, offset), nbytes, self.address + offset, memory, self)
