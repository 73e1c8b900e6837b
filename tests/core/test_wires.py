"""Frames and local messages survive the way there and back, and damage is noticed."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError
from allfold_core.frames import HEADER_SIZE, FrameError, FrameHeader, FrameType
from allfold_core.local_wire import (
    Message,
    OpMessage,
    Region,
    pack_json,
    pack_outcome,
    unpack_json,
    unpack_outcome,
)
from allfold_core.operations import Fingerprint, Kind, ReduceOp

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@given(st.sampled_from(FrameType), U32, U64, U64, U64, U32, U64, U64)
def test_a_frame_header_comes_out_as_it_went_in(
    kind: FrameType, epoch: int, number: int, seq: int, offset: int, length: int, a: int, b: int
) -> None:
    header = FrameHeader(kind, epoch, number, seq, offset, length, a, b)
    packed = header.pack()
    assert len(packed) == HEADER_SIZE
    assert FrameHeader.unpack(packed) == header


@given(st.integers(0, HEADER_SIZE - 1), st.integers(1, 255))
def test_one_damaged_byte_of_a_header_is_noticed(position: int, change: int) -> None:
    packed = bytearray(FrameHeader(FrameType.DATA, 1, 2, 3, 4, 5, 6, 7).pack())
    packed[position] ^= change
    with pytest.raises(FrameError):
        FrameHeader.unpack(packed)


def test_a_header_that_is_cut_off_or_of_an_unknown_type_is_no_frame() -> None:
    packed = FrameHeader(FrameType.DATA, 1, 2, 3, 4, 5, 6, 7).pack()
    for length in range(HEADER_SIZE):
        with pytest.raises(FrameError, match=f"not {length}"):
            FrameHeader.unpack(packed[:length])
    body = packed[:2] + b"\x09" + packed[3:-4]
    with pytest.raises(FrameError, match="unknown type: 9"):
        FrameHeader.unpack(body + struct.pack("<I", zlib.crc32(body)))


FINGERPRINT = Fingerprint(Kind.REDUCE, ReduceOp.MEAN, DType.BFLOAT16, (3, 0, 7), 2, "tree(4)")


@given(U32, U64, st.floats(0.001, 1e9), U32, U64, U64)
def test_an_op_message_comes_out_as_it_went_in(
    group: int, seq: int, timeout: float, segment: int, offset: int, nbytes: int
) -> None:
    message = OpMessage(
        group,
        seq,
        timeout,
        Region(segment, offset),
        Region(0, 64),
        nbytes,
        FINGERPRINT.pack(),
    )
    assert OpMessage.unpack(message.pack()) == message
    assert message.parsed_fingerprint() == FINGERPRINT


def test_a_short_op_message_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match="at least 56 bytes, got 3"):
        OpMessage.unpack(b"\x09\0\0")


def test_outcomes_carry_their_error() -> None:
    assert unpack_outcome(pack_outcome(Message.DONE, 3, 9)) == (3, 9, None)
    error = AllfoldError("broken", rank=2).to_dict()
    assert unpack_outcome(pack_outcome(Message.FAILED, 3, 9, error)) == (3, 9, error)


def test_json_messages_are_objects() -> None:
    assert unpack_json(pack_json(Message.HELLO, {"pid": 1})) == {"pid": 1}
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        unpack_json(b"\x01[]")
