"""A page as one of its ranks has it mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, RLock
from time import monotonic
from typing import TypeVarTuple

import numpy as np

from allfold._arena import ArenaBlock, Bytes
from allfold._process import futex
from allfold._session.requests import Files
from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.page import WORD, PageLayout, PostHeader, write_again, write_header

Given = TypeVarTuple("Given")

SPINS = 50
"""So often a rank looks before it blocks: some tens of microseconds where nothing else wants the
processor."""
# How long a rank waits until the agent has read what it has sent, before it sends more.
_READ_SECONDS = 0.01


class RankPage:
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
        """Order memory: others see what was stored before this as anything is loaded after it.

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

    def input_block(self, slot: int, nbytes: int) -> ArenaBlock:
        """The memory in which this rank leaves its input."""
        return self._block(self.layout.input_offset(self.index, slot), nbytes)

    def output_block(self, slot: int, nbytes: int) -> ArenaBlock:
        """The memory in which the agent leaves the result of an op that it has taken over."""
        return self._block(self.layout.output_offset(self.index, slot), nbytes)

    def place_block(self, place: int, nbytes: int) -> ArenaBlock:
        """The memory in which the agent leaves the result of an op that is not in a slot."""
        return self._block(self.layout.place_offset(place), nbytes)

    def _block(self, offset: int, nbytes: int) -> ArenaBlock:
        memory = self._memory[offset : offset + nbytes]
        return ArenaBlock(Region(0, offset), nbytes, self.address + offset, memory, self)


class PostHeaders:
    """The headers of a rank's posts, of which those that stay as they are need not be written."""

    def __init__(self, page: RankPage, epoch: int) -> None:
        self._page = page
        self._epoch = epoch
        slots = range(page.layout.slots)
        self._words = [page.layout.post_word(page.index, slot) for slot in slots]
        self._written: list[object] = [None for _ in slots]

    def write(
        self, slot: int, digest: int, packed: bytes, timeout: float, called: float, seq: int
    ) -> None:
        """Write the header of a post, and its fingerprint, but for the word that publishes it."""
        word, view, header = self._words[slot], self._page.view, (packed, timeout)
        if self._written[slot] == header:
            write_again(view, word, called, seq)
            return
        self._written[slot] = None  # before the first byte: an exception may leave it half written
        start = self._page.layout.fingerprint_offset(self._page.index, slot)
        view[start : start + len(packed)] = packed
        about = PostHeader(digest, called, timeout, self._epoch, len(packed), seq)
        write_header(view, word, about)
        self._written[slot] = header


class PageWords:
    """The indices of the words of a page that one rank reads and writes; lists are by slot.

    Attributes:
        others: the posts on which this rank waits to finish.
        locals: the posts of the other ranks of the node.
        mine: the posts of this rank.
        waiting: who of the others blocks, and on which word; ``i_wait`` is this rank's.
        read: the last message of this rank that the agent has read.
        finished: up to where those have finished who read this rank's slots; ``i_finished`` is
            this rank's.
    """

    def __init__(self, layout: PageLayout, me: int, *, crosses_nodes: bool) -> None:
        others = [rank for rank in range(layout.ranks) if rank != me]
        # Across nodes, a rank reads nothing but what the agent has made of all inputs.
        rows = [layout.agent] if crosses_nodes else others
        slots = range(layout.slots)
        self.others = [[layout.post_word(row, slot) for row in rows] for slot in slots]
        self.locals = [[layout.post_word(rank, slot) for rank in others] for slot in slots]
        self.mine = [layout.post_word(me, slot) for slot in slots]
        self.waiting = [layout.waiting_word(row) for row in rows]
        self.i_wait = layout.waiting_word(me)
        self.read = layout.read_word(me)
        readers = [] if crosses_nodes else others
        self.finished = [layout.finished_word(rank) for rank in readers]
        self.i_finished = layout.finished_word(me)


class BlockingTurn:
    """The turn of one thread of a rank to block on the page: there is one word to announce it in.

    Args:
        announced: that word.
    """

    def __init__(self, page: RankPage, announced: int) -> None:
        self._page = page
        self._announced = announced
        self._turn = RLock()  # it can be told whose it is, see _end

    def take(self, seconds: float, act: Callable[[*Given], None], *given: *Given) -> bool:
        """Do ``act(...)`` in the turn of this thread; return False if it does not come in time."""
        try:
            if not self._turn.acquire(timeout=seconds):
                return False
            act(*given)
            self._end()
        except BaseException:
            self._end()
            raise
        return True

    def block(self, word: int, may_block: Callable[[int], bool], seconds: float) -> None:
        """Block on a word, for so long at most, if its value says that there is something to await.

        To be called in the turn. It is announced before the value is read: whoever changes the word
        after that sees the announcement, and wakes this rank.
        """
        words = self._page.words
        words[self._announced] = word + 1
        self._page.fence()
        value = words[word]
        if may_block(value):
            self._page.wait(word, value, int(seconds * 1e6))

    def _end(self) -> None:
        """Give up the turn. Twice, or in a thread that has not got it, it does no harm."""
        # Before the turn is given up: the next thread announces itself in this word.
        self._page.words[self._announced] = 0
        with suppress(RuntimeError):  # this thread has not got the lock, or has given it back
            self._turn.release()


class MessageGate:
    """Keeps a rank from posting while the agent has not read a message that it has sent.

    Args:
        read: the word that says what the agent has read.
        turn: to block on the page.

    Attributes:
        unread: the op of the last message, unless the agent is known to have read that; -1 for
            none.
    """

    def __init__(self, page: RankPage, read: int, turn: BlockingTurn) -> None:
        self.unread = -1
        self._words = page.words
        self._read = read
        self._turn = turn

    def is_open(self) -> bool:
        """Return True once the agent has read all messages; wait a moment for that."""
        if self.unread < 0:
            return True
        words, word, spins, deadline = self._words, self._read, SPINS, 0.0
        while words[word] <= self.unread:
            if spins:
                spins -= 1
                os.sched_yield()
                continue
            now = monotonic()
            deadline = deadline or now + _READ_SECONDS
            if now >= deadline:
                return False
            if not self._turn.take(
                0.0, self._turn.block, word, lambda read: read <= self.unread, deadline - now
            ):
                os.sched_yield()
        self.unread = -1
        return True


class FinishedOps:
    """The ops that all have finished who read this rank's slots.

    Args:
        words: by which they say so.
    """

    def __init__(self, page: RankPage, words: list[int]) -> None:
        self._page_words = page.words
        self._words = words
        self._end = 0  # as it was when somebody looked last

    def by_all(self, seq: int) -> bool:
        """Return True if all have finished an op."""
        if seq >= self._end:
            words = self._page_words
            self._end = min([words[word] for word in self._words], default=seq + 1)
        return seq < self._end
