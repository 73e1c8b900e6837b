"""The frames of an edge: a fixed header, then the payload.

An edge carries the data of one direction between two agents. Frames are numbered from 0 without
gaps, so a receiver that lost its connection asks for the first frame that it has not got. It
acknowledges what it has received with the number of the frame that it expects next
(:data:`ACK`), in the opposite direction of the same connection.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0xAF01
EDGE_PROTOCOL = "allfold-edge/5"
ACK = struct.Struct("<Q")

_BODY = struct.Struct("<HBxQQQQIQQI")
_CHECK = struct.Struct("<I")
_HEADER = struct.Struct(_BODY.format + "I")
HEADER_SIZE = _HEADER.size
_RANGE = struct.Struct("<IIQQ")
RANGE_SIZE = _RANGE.size
# The value of ``behind`` where the sender does not know it.
UNKNOWN_BEHIND = 2**32 - 1


class FrameType(IntEnum):
    """The content of a frame.

    ``DATA``, ``SIGNAL`` and ``SHARED`` belong to the ops of a group; ``SHARED`` stands for ``DATA``
    that lie in memory which the receiver can map (:class:`SharedRange`). The others carry
    point-to-point messages, on edges of their own, in the order of the table; ``seq`` is then the
    message's number among those of its sending node. ``GRANT``, ``TAKEN`` and ``REFUSED`` go from
    the receiver to the sender.

    ==========  =====================================================================
    OFFER       an envelope, and the content itself where that is small
    GRANT       a receive takes it: send the content
    PARCEL      a piece of the content, at byte ``offset``
    TAKEN       all of it has been received
    REFUSED     it was not received; an error as JSON
    WITHDRAWN   the sender has given up; an error as JSON
    ==========  =====================================================================
    """

    DATA = 1
    SIGNAL = 2
    OFFER = 3
    GRANT = 4
    PARCEL = 5
    TAKEN = 6
    REFUSED = 7
    WITHDRAWN = 8
    SHARED = 9


_TYPES = {int(kind): kind for kind in FrameType}


class FrameError(ValueError):
    """Bytes that are no frame of this protocol."""


class FrameHeader(NamedTuple):
    """One frame's header.

    Attributes:
        type: what the frame carries.
        stamp: of the attempt that the frame belongs to: the greater of two is the newer one. Edges
            do not look at it; 0 for point-to-point messages, which belong to no attempt.
        number: the frame's place in the edge's stream, from 0.
        seq: the op's number inside its group; of a point-to-point frame, the message's number.
        offset: the first element of the payload in the op's index space.
        length: the payload's size in bytes.
        fingerprint: a 64-bit digest of the op's fingerprint on the sending node.
        digest: a 64-bit digest of the payload; 0 where the sender computed none, because the edge
            does not leave the machine.
        behind: how many ops lie between this one and the last of which the sender knows that it is
            over on every node; :data:`UNKNOWN_BEHIND` where it does not know.
    """

    type: FrameType
    stamp: int
    number: int
    seq: int
    offset: int
    length: int
    fingerprint: int
    digest: int
    behind: int = UNKNOWN_BEHIND

    def pack(self) -> bytes:
        """The header's :data:`HEADER_SIZE` bytes, the last four a CRC-32 of the others."""
        body = _BODY.pack(MAGIC, *self)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        """The inverse of :meth:`pack`; :class:`FrameError` for anything else."""
        if len(data) < HEADER_SIZE:
            raise FrameError(f"a frame's header has {HEADER_SIZE} bytes, not {len(data)}")
        magic, code, stamp, number, *rest, check = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise FrameError(f"not an Allfold frame: magic {magic:#06x}, expected {MAGIC:#06x}")
        if check != zlib.crc32(data[: _BODY.size]):
            raise FrameError(f"the header of frame {number} is damaged: its checksum differs")
        kind = _TYPES.get(code)
        if kind is None:
            raise FrameError(f"frame {number} is of an unknown type: {code}")
        return cls(kind, stamp, number, *rest)


class SharedRange(NamedTuple):
    """The payload of a ``SHARED`` frame: where in a file of the sender's the content lies.

    The sender numbers the files that it has passed on a connection, and reuses the numbers.

    Attributes:
        slot: the number of the file.
        is_new: 1 where the file comes with this frame, and takes the place of an earlier one.
        start: the first byte.
        nbytes: the size of the content.
    """

    slot: int
    is_new: int
    start: int
    nbytes: int

    def pack(self) -> bytes:
        """The range's :data:`RANGE_SIZE` bytes."""
        return _RANGE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> SharedRange:
        """The inverse of :meth:`pack`."""
        return cls(*_RANGE.unpack(data))
