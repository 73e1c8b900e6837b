"""The messages between a rank and its node agent, over a Unix socket of type SEQPACKET.

A message is one packet whose first byte is its type. What happens once (hello, join, leave) is
JSON; what happens for every op is a fixed struct. Tensors never pass here: they lie in the rank's
arena, whose segments (memfds, or memory of a GPU) are handed over with SCM_RIGHTS, beside a
``SEGMENT`` or a ``SHARE`` message.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from allfold_core.dtypes import NO_ALIAS, Alias
from allfold_core.errors import InvalidArgument
from allfold_core.schema import read_object

PROTOCOL_VERSION = 9
MAX_MESSAGE = 64 * 1024
LONGEST_TIMEOUT = 30 * 24 * 3600.0


class Message(IntEnum):
    """The type byte of a message; the comment says who sends it."""

    HELLO = 1  # rank: JSON
    WELCOME = 2  # agent: JSON
    SEGMENT = 3  # rank: SEGMENT struct, one file descriptor
    JOIN = 4  # rank: JSON
    JOINED = 5  # agent: JSON
    REFUSED = 6  # agent: JSON, the error of a HELLO or of a request
    LEAVE = 7  # rank: JSON
    LEFT = 8  # agent: JSON
    OP = 9  # rank: OP struct, fingerprint
    DONE = 10  # agent: OUTCOME struct
    FAILED = 11  # agent: OUTCOME struct, JSON error
    SEND = 12  # rank: PAIR struct, name of an alias
    RECV = 13  # rank: PAIR struct, name of an alias
    EXPLAIN = 14  # rank: JSON
    EXPLAINED = 15  # agent: JSON
    SHARE = 16  # rank: JSON, one file descriptor
    SHARED = 17  # agent: JSON
    EPOCH = 18  # agent: JSON, before the first outcome that carries the epoch
    HOLD = 19  # agent: JSON, every second while a group recovers
    DRAIN = 20  # agent: JSON, once: the process is to leave its groups where it can
    TRANSFER = 21  # rank: JSON, one file descriptor: the socket of a state transfer
    BOUNDARY = 24  # rank: JSON, it commits its state where others join or leave
    PASSED = 25  # agent: JSON, the answer to BOUNDARY: the rank may go on
    RETIRE = 26  # rank: JSON, it wants to leave at the next boundary
    LOOK = 27  # rank: JSON, an op that it has posted to the short lane's page is not done yet
    TAKEN = 28  # agent: JSON, it has taken over the ops of a group's short lane, as the page says
    ABANDON = 29  # rank: JSON, it cannot call an op, whose number counts as called


SEGMENT = struct.Struct("<BxxxIQ")
OUTCOME = struct.Struct("<BxxxIQIII")
FENCE_WORD = struct.Struct("<I")
_FENCE = struct.Struct("<IIQ")
_OP = struct.Struct("<BxxxIQdIIQQ16sIxxxx")
_PAIR = struct.Struct("<BBxxIQdiIqQQ16sII")
FIRST_PAIR = 1 << 63
# How many calls of one rank in one group may be without an outcome. Of collectives, the SDK waits
# for the oldest one before it starts another: all ranks call them in one order, so that one ends.
# Messages have no such order, so there is nothing to wait for: one too many is refused.
MAX_OPEN_OPS = 1024
MAX_OPEN_MESSAGES = 16384
_SHORTENED = 4096
# Looked up for every op, which takes a tenth of what the enumeration itself would take.
_OUTCOME_KINDS = {kind.value: kind for kind in (Message.DONE, Message.FAILED)}


class Region(NamedTuple):
    """A range of bytes in one segment of a rank's arena."""

    segment: int
    offset: int


class Fence(NamedTuple):
    """A point in the work of a rank's GPU, after which the memory of a call may be used.

    When the GPU reaches that point, it writes a word of the arena, in host memory. The agent reads
    the word, for which it needs no GPU, and no process waits for a GPU whose owner has died.

    Attributes:
        word: where it is.
        value: what it must have reached, as a counter of 32 bits that wraps round; 0 for a call
            that waits for nothing.
    """

    word: Region
    value: int

    def is_passed(self, word: int) -> bool:
        """Return True if a word of this value lets the call pass."""
        return (word - self.value) & 0xFFFFFFFF < 1 << 31

    def pack(self) -> bytes:
        return _FENCE.pack(self.word.segment, self.value, self.word.offset)

    @classmethod
    def unpack(cls, data: bytes) -> Fence:
        """The inverse of :meth:`pack`."""
        segment, value, offset = _FENCE.unpack(data)
        return cls(Region(segment, offset), value)


# Nearly all calls have this one, and are not to pay for those that have another.
NO_FENCE = Fence(Region(0, 0), 0)
_NO_FENCE = NO_FENCE.pack()


class OpMessage(NamedTuple):
    """One rank's call: the op, and where its input and output lie.

    Attributes:
        group: the number that the agent gave the group when the rank joined.
        seq: the op's number inside the group.
        timeout: seconds until the agent fails the op.
        source: the input; how long it is the fingerprint says.
        target: where the result is wanted.
        fingerprint: the packed fingerprint.
        fence: until when input and output are still in use.
        view: the newest epoch that the rank knew when it called; a root is a number of this one.
    """

    group: int
    seq: int
    timeout: float
    source: Region
    target: Region
    fingerprint: bytes
    fence: Fence = NO_FENCE
    view: int = 0

    def pack(self) -> bytes:
        head = _OP.pack(
            Message.OP,
            self.group,
            self.seq,
            self.timeout,
            self.source.segment,
            self.target.segment,
            self.source.offset,
            self.target.offset,
            _NO_FENCE if self.fence is NO_FENCE else self.fence.pack(),
            self.view,
        )
        return head + self.fingerprint

    @classmethod
    def unpack(cls, data: bytes) -> OpMessage:
        """The inverse of :meth:`pack`; ``ValueError`` for a message that is too short."""
        if len(data) < _OP.size:
            raise ValueError(f"an op message has at least {_OP.size} bytes, got {len(data)}")
        head = _OP.unpack_from(data)
        _, group, seq, timeout, source, target, source_offset, target_offset, fence, view = head
        return cls(
            group,
            seq,
            timeout,
            Region(source, source_offset),
            Region(target, target_offset),
            data[_OP.size :],
            NO_FENCE if fence == _NO_FENCE else Fence.unpack(fence),
            view,
        )


class P2PMessage(NamedTuple):
    """One rank's send or receive.

    Attributes:
        kind: ``SEND`` or ``RECV``.
        group: the number that the agent gave the group when the rank joined.
        seq: the call's number among the sends and receives of this rank, from :data:`FIRST_PAIR`,
            so that it is never the number of an op.
        timeout: seconds until the agent fails the call.
        peer: the rank at the other end; of a receive, -1 for any.
        tag: a number of 63 bits.
        dtype: the code of the type in which the elements travel.
        memory: the tensor.
        nbytes: its size.
        fence: until when it is still in use.
        view: the newest epoch that the rank knew when it called; the peer is a number of this one.
        alias: the type of the caller's elements, where it is another one.
    """

    kind: Message
    group: int
    seq: int
    timeout: float
    peer: int
    tag: int
    dtype: int
    memory: Region
    nbytes: int
    fence: Fence = NO_FENCE
    view: int = 0
    alias: Alias = NO_ALIAS

    def pack(self) -> bytes:
        head = _PAIR.pack(
            self.kind,
            self.dtype,
            self.group,
            self.seq,
            self.timeout,
            self.peer,
            self.memory.segment,
            self.tag,
            self.memory.offset,
            self.nbytes,
            _NO_FENCE if self.fence is NO_FENCE else self.fence.pack(),
            self.view,
            self.alias.width,
        )
        return head if self.alias is NO_ALIAS else head + self.alias.encode()

    @classmethod
    def unpack(cls, data: bytes) -> P2PMessage:
        """The inverse of :meth:`pack`; ``ValueError`` for a message that cannot be."""
        if len(data) < _PAIR.size:
            raise ValueError(f"a send or receive has at least {_PAIR.size} bytes, got {len(data)}")
        kind, dtype, group, seq, timeout, peer, segment, tag, *rest = _PAIR.unpack_from(data)
        offset, nbytes, packed, view, width = rest
        fence = NO_FENCE if packed == _NO_FENCE else Fence.unpack(packed)
        head = (Message(kind), group, seq, timeout, peer, tag, dtype)
        alias = Alias.decode(data[_PAIR.size :], width)
        return cls(*head, Region(segment, offset), nbytes, fence, view, alias)


class Outcome(NamedTuple):
    """The outcome of a call: ``DONE``, or ``FAILED``.

    Attributes:
        kind: which of the two.
        group: the number that the agent gave the group when the rank joined.
        seq: the number of the call.
        epoch: the ordinal of the epoch that the rank is in as soon as it is told.
        participants: the number of ranks whose input the result is made from; 0 of an error, and
            of a message.
        body: of an error its JSON form; else whatever there is to say.
    """

    kind: Message
    group: int
    seq: int
    epoch: int
    participants: int = 0
    body: dict[str, Any] | None = None
    boundary: int = 0

    def pack(self) -> bytes:
        """The packed message; an error that does not fit it loses details and the text's end."""
        head = OUTCOME.pack(
            self.kind, self.group, self.seq, self.epoch, self.participants, self.boundary
        )
        if self.body is None:
            return head
        packed = head + json.dumps(self.body).encode()
        if len(packed) <= MAX_MESSAGE:
            return packed
        text = str(self.body.get("message"))[:_SHORTENED]
        return head + json.dumps({**self.body, "message": text, "details": {}}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Outcome:
        """The inverse of :meth:`pack`; ``ValueError`` for a message that is none."""
        if len(data) < OUTCOME.size or data[0] not in _OUTCOME_KINDS:
            raise ValueError(f"an outcome has at least {OUTCOME.size} bytes, got {data[:40]!r}")
        kind, group, seq, epoch, participants, boundary = OUTCOME.unpack_from(data)
        body = read_object(data[OUTCOME.size :]) if len(data) > OUTCOME.size else None
        return cls(_OUTCOME_KINDS[kind], group, seq, epoch, participants, body, boundary)


def pack_json(kind: Message, body: dict[str, Any]) -> bytes:
    """A JSON message: the type byte, then the object."""
    return bytes([kind]) + json.dumps(body, separators=(",", ":")).encode()


def unpack_json(data: bytes) -> dict[str, Any]:
    """The object of a JSON message; ``ValueError`` where it holds none."""
    return read_object(data[1:])


def check_timeout(seconds: float) -> None:
    """Refuse a time limit that is none, also NaN; ``InvalidArgument``."""
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise InvalidArgument(f"a timeout is more than 0 s and at most {LONGEST_TIMEOUT:g} s")


def pack_taken(group: int) -> bytes:
    """A ``TAKEN`` message.

    Args:
        group: the number that the agent gave the group when the rank joined.
    """
    return pack_json(Message.TAKEN, {"number": group})


def pack_drain(reason: str) -> bytes:
    """A ``DRAIN`` message; ``reason``: a sentence without a full stop."""
    return pack_json(Message.DRAIN, {"reason": reason})


def pack_hold(group: int, waits_for: str, seconds: float) -> bytes:
    """A ``HOLD`` message: the group recovers, and deadlines of its ops are suspended.

    Args:
        group: the number that the agent gave the group when the rank joined.
        waits_for: what it waits for, in words that follow "waits for".
        seconds: for how long, in this recovery.
    """
    body = {"number": group, "waits_for": waits_for, "seconds": seconds}
    return pack_json(Message.HOLD, body)
