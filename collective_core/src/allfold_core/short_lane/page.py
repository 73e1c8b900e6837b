"""The page: the memory in which the ranks of one node meet, laid out in 64-bit words and slots.

The agent makes one page per group and epoch, and hands it to its ranks. Each rank has a ring of
slots. To call an op it writes its input and a header into the next slot, and last the word that
says which op that is. An op uses slot ``seq % slots`` of each rank.

In a group on several nodes a tensor may be longer than a slot: then the header says where in the
rank's arena its input lies, and where a result would go that comes by message. The agent puts the
result of such an op into a *place* of the page, and says which one it is beside its word.

In a group on one node the ranks do an op by themselves: each reads the inputs of all. In a group on
several nodes the agent, which has a row of slots of its own, exchanges what its ranks have posted
with the other agents, and posts the node's result.

Who may decide on an op is said by three words that only the agent writes:

- ``FIRST``: the ranks do the ops from this number on by themselves, those below it are the agent's.
- ``SINCE`` and ``HELD``: the posted ops from the one up to the other are complete, and stay so.

A rank finishes an op if it sees the posts of all ranks, and *after that* that the op is not below
``FIRST``; it finishes its ops in order. To take ops away from the ranks, the agent sets ``FIRST``
to :data:`NEVER`, makes the stores of all ranks visible (``membarrier``), and reads the posts: what
all have posted is held, up to the first op that somebody has not posted; this one and those behind
it nobody has finished. This order is that of ``survival.md``, 6.9.

So that there is no gap in what a rank posts, it posts nothing more after it has sent a short op as
a message, until the agent has taken the ops away and given others back. And it posts nothing while
the agent has yet to read a message that the rank has sent: so whatever the agent finds posted comes
behind all that it does not know yet.

A rank that posts looks at ``FIRST`` once more when others can see its post. If the op is the
agent's by then, the agent may not have seen the post, and is asked to look.

Plain loads and stores of words have to stay in their order, as they do on x86-64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

from allfold_core.protocol.rank_messages import Region

SLOTS = 8
SLOT_BYTES = 64 * 1024
FINGERPRINT_BYTES = 448
NEVER = (1 << 63) - 1
"""``FIRST`` while all ops are the agent's."""

WORD = 8
FIRST = 0
HELD = 1
SINCE = 2
_LINE = 8  # words: what two processors write to should not share a cache line
_ALIGNMENT = 4096
_HEADER = struct.Struct("<QddIIq")
_CALLED = struct.Struct("<d")
_SEQ = struct.Struct("<q")
_ENDS = struct.Struct("<QQ")
_OFFSET_BITS = 48


class PostHeader(NamedTuple):
    """The call that a slot holds.

    Attributes:
        digest: of the fingerprint; equal for equal fingerprints.
        called: when the rank called (seconds of the machine's monotonic clock).
        timeout: seconds until the op fails.
        view: the ordinal of the newest epoch that the rank knew.
        fingerprint_bytes: the length of the packed fingerprint.
        seq: of the op. It is written last, and what was there is cleared first: where it is not
            what the slot's word says, the slot is being written to for a later op.
    """

    digest: int
    called: float
    timeout: float
    view: int
    fingerprint_bytes: int
    seq: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The places in a page. Its rows of slots are those of the ranks, and then the agent's.

    Attributes:
        ranks: the number of ranks of the node.
        slots: of each rank.
        slot_bytes: the longest input, and the longest output, of an op in a slot.
        place_bytes: the longest result of an op whose inputs lie in the arenas; 0 without such ops.
    """

    ranks: int
    slots: int = SLOTS
    slot_bytes: int = SLOT_BYTES
    place_bytes: int = 0

    @property
    def agent(self) -> int:
        """The row of the agent."""
        return self.ranks

    # Words, by their index

    def finished_word(self, rank: int) -> int:
        """The word in which a rank says that it needs no slot of an op below this number."""
        return _LINE + rank

    def waiting_word(self, rank: int) -> int:
        """The word in which a row announces that it blocks: 1 + the index of what it awaits."""
        return self._lines(1) + rank

    def read_word(self, rank: int) -> int:
        """The word in which the agent says which messages it has read: 1 + the last one's op."""
        return self._lines(2) + rank

    def post_word(self, rank: int, slot: int) -> int:
        """The word that says which op a slot holds: 1 + its number; 0 for none yet."""
        return self._lines(3) + (rank * self.slots + slot) * _LINE

    @property
    def words(self) -> int:
        """The number of all words."""
        return self._lines(3) + self._rows * self.slots * _LINE

    @property
    def _rows(self) -> int:
        return self.ranks + 1

    def _lines(self, arrays: int) -> int:
        """The words before so many arrays of one word per row have ended."""
        return _LINE + arrays * (-(-self._rows // _LINE) * _LINE)

    # Bytes, by their offset

    def fingerprint_offset(self, rank: int, slot: int) -> int:
        """The place of the packed fingerprint of a call."""
        return self.words * WORD + (rank * self.slots + slot) * FINGERPRINT_BYTES

    def input_offset(self, rank: int, slot: int) -> int:
        """The place of what a rank brings."""
        start = self.words * WORD + self._rows * self.slots * FINGERPRINT_BYTES
        return _aligned(start) + (rank * self.slots + slot) * 2 * self.slot_bytes

    def output_offset(self, rank: int, slot: int) -> int:
        """The place of what a rank gets."""
        return self.input_offset(rank, slot) + self.slot_bytes

    def place_offset(self, place: int) -> int:
        """The place of a result that is longer than a slot; there are as many as slots.

        They take no memory before something is written there.
        """
        start = self.input_offset(self._rows, 0)
        return _aligned(start) + place * _aligned(self.place_bytes)

    @property
    def size(self) -> int:
        """The size of the page in bytes."""
        return self.place_offset(self.slots)

    # In messages

    def to_dict(self) -> dict[str, int]:
        """The layout in JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_dict`."""
        return cls(*(int(body[each.name]) for each in fields(cls)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def digest_of(packed: bytes) -> int:
    """Return what ranks compare of a fingerprint."""
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def write_header(page: memoryview, word: int, header: PostHeader) -> None:
    """Write the header of a slot, but for the word that says that it is there.

    Args:
        word: the slot's :meth:`PageLayout.post_word`.
    """
    _HEADER.pack_into(page, (word + 1) * WORD, *header)


def write_again(page: memoryview, word: int, called: float, seq: int) -> None:
    """Update the header of a slot whose call is like the one before but for its time and number."""
    _CALLED.pack_into(page, (word + 2) * WORD, called)
    _SEQ.pack_into(page, (word + 5) * WORD, seq)


def write_ends(page: memoryview, word: int, source: Region, target: Region) -> None:
    """Write where the input and the result of a call lie in the arena of its rank."""
    _ENDS.pack_into(page, (word + 6) * WORD, _packed(source), _packed(target))


def read_ends(page: memoryview, word: int) -> tuple[Region, Region]:
    """Read what :func:`write_ends` has written."""
    source, target = _ENDS.unpack_from(page, (word + 6) * WORD)
    return _region(source), _region(target)


def _packed(region: Region) -> int:
    return region.segment << _OFFSET_BITS | region.offset


def _region(packed: int) -> Region:
    return Region(packed >> _OFFSET_BITS, packed & (1 << _OFFSET_BITS) - 1)


def read_header(page: memoryview, word: int) -> PostHeader:
    """Read what :func:`write_header` has written."""
    return PostHeader._make(_HEADER.unpack_from(page, (word + 1) * WORD))
