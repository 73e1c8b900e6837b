"""Frames and local messages survive the way there and back, and damage is noticed."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire
from allfold_core.errors import AllfoldError, InvalidArgument
from allfold_core.operations import MAX_DIMENSIONS, Fingerprint, Kind
from allfold_core.protocol.frames import (
    HEADER_SIZE,
    RANGE_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
)
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    LONGEST_TIMEOUT,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    Fence,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
    check_timeout,
    pack_drain,
    pack_hold,
    pack_json,
    pack_taken,
    unpack_json,
)
from tests.core.cases import aliases

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


HEADERS = st.builds(FrameHeader, st.sampled_from(FrameType), U64, U64, U64, U64, U32, U64, U64, U32)


@given(HEADERS)
def test_a_frame_header_comes_out_as_it_went_in(header: FrameHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_SIZE == 64
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
    body = packed[:2] + b"\x0a" + packed[3:-4]
    with pytest.raises(FrameError, match="unknown type: 10"):
        FrameHeader.unpack(body + struct.pack("<I", zlib.crc32(body)))


@given(st.builds(SharedRange, U32, st.integers(0, 1), U64, U64))
def test_a_range_of_a_shared_file_is_read_as_it_was_packed(shared: SharedRange) -> None:
    packed = shared.pack()
    assert len(packed) == RANGE_SIZE
    assert SharedRange.unpack(packed) == shared


FINGERPRINT = Fingerprint(
    Kind.SCATTER, None, DType.BFLOAT16, (3, 0, 7), 2, "tree(4)", Wire.INT8, 0.5, 9, (4, 0, 1)
)
regions = st.builds(Region, U32, U64)
fences = st.builds(Fence, regions, U32)


def test_the_number_of_the_protocol_stands_for_these_structs() -> None:
    """Whoever changes one counts the number up, which agents and ranks compare."""
    op = OpMessage(1, 2, 3.0, Region(0, 0), Region(0, 0), b"")
    pair = P2PMessage(Message.SEND, 1, FIRST_PAIR, 5.0, 0, 0, 1, Region(0, 0), 4)
    barrier = Fingerprint(Kind.BARRIER, None, DType.UINT8, (), -1, "auto")
    sizes = [len(each.pack()) for each in (op, pair, barrier)]
    assert (PROTOCOL_VERSION, sizes) == (9, [72, 80, 68])


@given(
    st.builds(
        OpMessage,
        group=U32,
        seq=U64,
        timeout=st.floats(0.001, 1e9),
        source=regions,
        target=regions,
        fingerprint=st.just(FINGERPRINT.pack()),
        fence=fences,
        view=U32,
    )
)
def test_an_op_message_comes_out_as_it_went_in(message: OpMessage) -> None:
    packed = message.pack()
    assert packed[0] == Message.OP
    assert OpMessage.unpack(packed) == message
    assert Fingerprint.unpack(OpMessage.unpack(packed).fingerprint) == FINGERPRINT


def test_a_short_op_message_is_refused_with_both_sizes() -> None:
    with pytest.raises(ValueError, match="at least 72 bytes, got 3"):
        OpMessage.unpack(b"\x09\0\0")


@given(U32, st.integers(0, 2**31 - 1))
def test_a_fence_is_passed_from_its_value_on_even_where_the_counter_wraps(
    value: int, further: int
) -> None:
    fence = Fence(Region(0, 0), value)
    assert fence.is_passed((value + further) % 2**32)
    assert not fence.is_passed((value - 1 - further) % 2**32)


def test_an_op_message_whose_fingerprint_is_cut_off_is_refused_when_it_is_read() -> None:
    packed = OpMessage(1, 2, 3.0, Region(0, 0), Region(0, 0), FINGERPRINT.pack()).pack()
    with pytest.raises(ValueError, match=r"3 dimensions, 3 counts and .* cannot have"):
        Fingerprint.unpack(OpMessage.unpack(packed[:-1]).fingerprint)


def test_the_calls_of_large_groups_fit_into_a_message() -> None:
    """An all-to-all of 2048 ranks, each of which names all others twice."""
    fingerprint = Fingerprint(
        Kind.ALL_TO_ALL,
        None,
        DType.FLOAT32,
        (1,) * MAX_DIMENSIONS,
        -1,
        "auto",
        counts=(1 << 40,) * 4096,
    )
    packed = OpMessage(1, 2, 3.0, Region(0, 0), Region(0, 0), fingerprint.pack()).pack()
    assert len(packed) <= MAX_MESSAGE


@given(
    st.builds(
        P2PMessage,
        kind=st.sampled_from([Message.SEND, Message.RECV]),
        group=U32,
        seq=st.integers(FIRST_PAIR, 2**64 - 1),
        timeout=st.floats(0.001, 1e9),
        peer=st.integers(-1, 2**31 - 1),
        tag=st.integers(0, 2**63 - 1),
        dtype=st.sampled_from([dtype.code for dtype in DType]),
        memory=regions,
        nbytes=U64,
        fence=fences,
        view=U32,
        alias=aliases,
    )
)
def test_a_send_or_receive_comes_out_as_it_went_in(message: P2PMessage) -> None:
    packed = message.pack()
    assert packed[0] == message.kind
    assert P2PMessage.unpack(packed) == message


@pytest.mark.parametrize("more", [-1, 1, 65])
def test_a_send_of_another_size_is_refused(more: int) -> None:
    packed = P2PMessage(Message.SEND, 1, FIRST_PAIR, 5.0, 0, 0, 1, Region(0, 0), 4).pack()
    data = (packed + bytes(100))[: len(packed) + more]
    with pytest.raises(ValueError, match=r"has at least 80 bytes, got 79|name of a dtype"):
        P2PMessage.unpack(data)


def test_outcomes_carry_their_error() -> None:
    done = Outcome(Message.DONE, 3, 9, epoch=2, participants=4)
    assert Outcome.unpack(done.pack()) == done
    error = AllfoldError("broken", rank=2).to_dict()
    failed = Outcome(Message.FAILED, 3, 9, epoch=2, body=error)
    assert Outcome.unpack(failed.pack()) == failed


def test_a_node_that_drains_says_why() -> None:
    told = pack_drain("node a drains")
    assert (told[0], unpack_json(told)) == (Message.DRAIN, {"reason": "node a drains"})


def test_news_of_a_group_name_it_by_its_number() -> None:
    taken = pack_taken(7)
    assert (taken[0], unpack_json(taken)) == (Message.TAKEN, {"number": 7})
    hold = pack_hold(7, "node-b", 1.5)
    said = {"number": 7, "waits_for": "node-b", "seconds": 1.5}
    assert (hold[0], unpack_json(hold)) == (Message.HOLD, said)


def test_an_outcome_that_fits_no_message_keeps_the_beginning_of_its_text() -> None:
    error = AllfoldError("x" * MAX_MESSAGE, rank=2).to_dict()
    packed = Outcome(Message.FAILED, 3, 9, epoch=2, body=error).pack()
    assert len(packed) <= MAX_MESSAGE
    *numbers, body, boundary = Outcome.unpack(packed)
    assert (numbers, boundary) == ([Message.FAILED, 3, 9, 2, 0], 0)
    assert body is not None
    assert (body["code"], body["details"]) == (error["code"], {})
    assert set(body["message"]) == {"x"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="more than 0 s and at most"):
        check_timeout(seconds)
    check_timeout(LONGEST_TIMEOUT)


def test_json_messages_are_objects() -> None:
    assert unpack_json(pack_json(Message.HELLO, {"pid": 1})) == {"pid": 1}
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        unpack_json(b"\x01[]")
