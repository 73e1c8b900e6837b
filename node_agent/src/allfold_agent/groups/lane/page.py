"""The page of the short lane, as the agent has it; see :mod:`allfold_core.short_lane.page`."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from allfold_agent.runtime import machine
from allfold_agent.runtime.buffers import MappedMemory, SharedFile
from allfold_agent.runtime.locks import make_lock
from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.page import (
    FINGERPRINT_BYTES,
    FIRST,
    HELD,
    NEVER,
    SINCE,
    WORD,
    PageLayout,
    PostHeader,
    read_ends,
    read_header,
)

_REMEMBERED = 1024


class Post(NamedTuple):
    """A call that a rank has posted.

    Attributes:
        slot: in which its input lies.
    """

    seq: int
    slot: int
    header: PostHeader

    @property
    def is_whole(self) -> bool:
        """True unless the rank has begun to reuse the slot, as all have finished this op."""
        return self.header.seq == self.seq


class NextPost(NamedTuple):
    """An op that all ranks have posted.

    Attributes:
        fingerprint: packed, of one of them.
        is_mixed: the calls differ.
    """

    seq: int
    slot: int
    fingerprint: bytes
    is_mixed: bool


class AgentPage:
    """A file in memory that nobody can cut or extend.

    Attributes:
        layout: of the page.
        descriptor: of the file.
        mapping: the page.
        file: for agents of this machine.
    """

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.descriptor = os.memfd_create("allfold-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, layout.size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(self.descriptor, layout.size)
        self.mapping = MappedMemory(memory)
        self.file = SharedFile.read_only(self.descriptor)
        self._view = memoryview(memory)
        self._words = self._view[: layout.words * WORD].cast("Q")
        # Before any rank has the page: 0 would give them all ops.
        self._words[FIRST] = NEVER
        self._fingerprints: dict[int, bytes] = {}  # by digest
        # By slot, those of the ranks and last that of the agent: they are looked at for every op.
        rows, slots = range(layout.agent + 1), range(layout.slots)
        self._post_words = [[layout.post_word(row, slot) for row in rows] for slot in slots]
        self._waiting_words = [layout.waiting_word(rank) for rank in range(layout.ranks)]
        self._finished_words = [layout.finished_word(rank) for rank in range(layout.ranks)]
        self._fence = make_lock("fence")

    @property
    def first(self) -> int:
        """The ranks do ops from this one on; :data:`NEVER` if they do none."""
        return self._words[FIRST]

    def open(self, first: int) -> None:
        """Give the ranks the ops from this one on."""
        self._words[FIRST] = first

    def close(self) -> None:
        """Take the ops away from the ranks; what is read after this stays as it is.

        But for posts that come later, whose ranks know that.
        """
        self._words[FIRST] = NEVER
        machine.make_all_stores_visible()

    def hold(self, since: int, end: int) -> None:
        """Leave the ops of a range to the ranks to finish, and wake those that wait."""
        self._words[SINCE] = since  # first: who sees the new end sees this one too
        self._words[HELD] = end
        for rank in range(self.layout.ranks):
            awaited = self._words[self.layout.waiting_word(rank)]
            if 0 < awaited <= self.layout.words:
                machine.wake(self.mapping.address + (awaited - 1) * WORD)

    def note_read(self, rank: int, seq: int) -> None:
        """Tell a rank that its messages were read, up to that of an op."""
        word = self.layout.read_word(rank)
        self._words[word] = seq + 1
        # The rank sees the word before this reads who blocks.
        with self._fence:
            pass
        if self._words[self.layout.waiting_word(rank)] == word + 1:
            machine.wake(self.mapping.address + word * WORD)

    # The agent's row, in a group on several nodes

    def next_post(self, after: int) -> NextPost | None:
        """Return the first op from a number on that all ranks have posted; ``None`` without one."""
        all_words = self._words
        seq = self._first_posted(after)
        if seq < 0:
            return None
        slot = seq % self.layout.slots
        first, *others, _ = self._post_words[slot]
        digest, is_mixed = all_words[first + 1], False
        for word in others:
            if all_words[word] != seq + 1:
                return None
            is_mixed = is_mixed or all_words[word + 1] != digest
        packed = self._fingerprints.get(digest)
        if packed is None:
            if len(self._fingerprints) >= _REMEMBERED:
                self._fingerprints.clear()
            post = Post(seq, slot, read_header(self._view, first))
            packed = self._fingerprints[digest] = self.fingerprint(0, post)
        return NextPost(seq, slot, packed, is_mixed)

    def _first_posted(self, after: int) -> int:
        """Return the first op from a number on that the first rank has posted; -1 for none."""
        if self._words[self._post_words[after % self.layout.slots][0]] == after + 1:
            return after
        # A rank may post two ops while this looks, so that only the later one is seen. Once that
        # one is seen, all before it are there: so a second look finds the first of them.
        is_any = self._lowest_posted(after) >= 0
        return self._lowest_posted(after) if is_any else -1

    def _lowest_posted(self, after: int) -> int:
        posted = (self._words[words[0]] for words in self._post_words)
        return min((each for each in posted if each > after), default=0) - 1

    def publish(self, seq: int, slot: int, place: int) -> None:
        """Tell the ranks that the result of an op is in the agent's slot, or in a place."""
        all_words, words = self._words, self._post_words[slot]
        word = words[-1]
        if place >= 0:
            all_words[word + 2] = place
        all_words[word + 1] = all_words[words[0] + 1]
        # Last: who sees it reads the digest beside it.
        all_words[word] = seq + 1
        with self._fence:
            pass

    def wake_for_result(self, slot: int) -> None:
        """Wake the ranks that block until there is a result in the agent's slot."""
        word = self._post_words[slot][-1]
        if any(self._words[each] == word + 1 for each in self._waiting_words):
            machine.wake(self.mapping.address + word * WORD)

    def announce_agent(self, *, blocks: bool) -> None:
        """Tell the ranks whether the agent has to be woken for a post."""
        self._words[self.layout.waiting_word(self.layout.agent)] = blocks
        with self._fence:
            pass

    def ends(self, rank: int, slot: int) -> tuple[Region, Region]:
        """Return where the input of a post is in the arena, and where its result may go."""
        return read_ends(self._view, self.layout.post_word(rank, slot))

    def view(self, start: int) -> memoryview:
        """Return the page from a byte on."""
        return self._view[start:]

    def place(self, place: int) -> memoryview:
        """Return the memory of a result that is longer than a slot."""
        start = self.layout.place_offset(place)
        return self._view[start : start + self.layout.place_bytes]

    def discard_place(self, place: int) -> None:
        """Give the memory of a place back to the system, until something is written there."""
        start = self.layout.place_offset(place)
        self.mapping.memory.madvise(mmap.MADV_REMOVE, start, self.layout.place_bytes)

    def end_of_finished_by_all(self) -> int:
        """Return the number below which no local rank needs the result of an op."""
        return min([self._words[word] for word in self._finished_words])

    # Posts

    def posts(self, rank: int) -> list[Post]:
        """Return what a rank has posted and not overwritten since, in order."""
        return sorted(self._posts(rank))

    def posted(self, rank: int) -> list[int]:
        """Return the ops of :meth:`posts`, in no order."""
        layout = self.layout
        posted = [self._words[layout.post_word(rank, slot)] for slot in range(layout.slots)]
        return [each - 1 for each in posted if each]

    def _posts(self, rank: int) -> Iterator[Post]:
        for slot in range(self.layout.slots):
            word = self.layout.post_word(rank, slot)
            if posted := self._words[word]:
                yield Post(posted - 1, slot, read_header(self._view, word))

    def post_of(self, rank: int, seq: int) -> Post | None:
        """Return a rank's call of an op, if it is in its slot, and is not being overwritten."""
        slot = seq % self.layout.slots
        word = self.layout.post_word(rank, slot)
        if self._words[word] != seq + 1:
            return None
        post = Post(seq, slot, read_header(self._view, word))
        return post if post.is_whole else None

    def fingerprint(self, rank: int, post: Post) -> bytes:
        """Return the packed fingerprint of a call."""
        start = self.layout.fingerprint_offset(rank, post.slot)
        length = min(post.header.fingerprint_bytes, FINGERPRINT_BYTES)
        return bytes(self._view[start : start + length])

    def has_posted(self, seq: int) -> bool:
        """Return True if a rank has posted this op."""
        slot = seq % self.layout.slots
        return any(
            self._words[self.layout.post_word(rank, slot)] == seq + 1
            for rank in range(self.layout.ranks)
        )

    def last_post(self, rank: int) -> Post | None:
        """Return the last call that a rank has posted."""
        layout, all_words = self.layout, self._words
        slot = max(range(layout.slots), key=lambda each: all_words[layout.post_word(rank, each)])
        word = layout.post_word(rank, slot)
        posted = all_words[word]
        return Post(posted - 1, slot, read_header(self._view, word)) if posted else None

    def has_finished(self, rank: int) -> bool:
        """Return True if a rank has the outcome of all that it has posted."""
        last = self.last_post(rank)
        return last is None or self.end_of_finished(rank) > last.seq

    def end_of_finished(self, rank: int) -> int:
        """Return the number below which a rank has the outcome of all that it has posted."""
        return self._words[self.layout.finished_word(rank)]


def end_of_complete(posts: Sequence[Sequence[Post]], since: int) -> int:
    """Return the end of the ops that all ranks have posted, and posted alike.

    A rank posts all short ops of a time in which the lane is open, in order, but for those behind
    some op. What it has overwritten, all ranks have finished.

    Args:
        posts: of each rank, in order.
        since: the first op of that time.
    """
    by_seq: dict[int, list[Post]] = {}
    for each in posts:
        for post in each:
            if post.seq >= since:
                by_seq.setdefault(post.seq, []).append(post)
    slots = [{post.slot: post.seq for post in each} for each in posts]
    end = since
    for seq, found in sorted(by_seq.items()):
        slot = found[0].slot
        if any(each.get(slot, -1) < seq for each in slots):
            break
        if len({post.header.digest for post in found if post.is_whole}) > 1:
            break
        end = seq + 1
    return end
