"""The messages of a state transfer, between a rank and its agent, over a socket of its own.

The rank makes a pair of sockets of type SEQPACKET, hands one to the agent with a ``TRANSFER``
message, and sends ``START`` over the other, beside a memfd: the window, with room for some blocks.
A rank that offers its state is asked for blocks, and copies each to a slot of the window; one that
pulls is told of blocks that have come, and gives the slots back. The end of the socket is the end
of the transfer, whoever closes it.

A state is a stream of bytes: its head (a manifest, plain values and small tensors), then
its large tensors. It is cut into blocks, no block has bytes of both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

BLOCK_BYTES = 4 << 20
WINDOW_BLOCKS = 8
# Each has two connections and threads; more than these are held in reserve.
MAX_SOURCES = 32
_BLOCK = struct.Struct("<BxxxIQI")


class TransferMessage(IntEnum):
    """The type byte of a message; the comment says who sends it."""

    START = 1  # rank: JSON, one file descriptor
    READY = 2  # agent: JSON
    BLOCK = 3  # both: BLOCK struct
    DONE = 4  # agent: JSON, the pull is complete
    FAILED = 5  # agent: JSON error


class StateBlock(NamedTuple):
    """A block of a state, and its place in the window.

    Attributes:
        start: the offset of its first byte in the stream.
        nbytes: its size in bytes, at most :data:`BLOCK_BYTES`.
        slot: the slot of the window that holds it.
    """

    start: int
    nbytes: int
    slot: int

    def pack(self) -> bytes:
        return _BLOCK.pack(TransferMessage.BLOCK, self.nbytes, self.start, self.slot)

    @classmethod
    def unpack(cls, data: bytes) -> StateBlock:
        """The inverse of :meth:`pack`; ``ValueError`` for a message of another kind."""
        if len(data) != _BLOCK.size or data[0] != TransferMessage.BLOCK:
            raise ValueError(f"a block has {_BLOCK.size} bytes and type 3, got {data[:40]!r}")
        _, nbytes, start, slot = _BLOCK.unpack(data)
        return cls(start, nbytes, slot)


def spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Return the ranges of the blocks that a part of the stream (head or rest) is cut into."""
    for first in range(start, stop, BLOCK_BYTES):
        yield first, min(first + BLOCK_BYTES, stop)
