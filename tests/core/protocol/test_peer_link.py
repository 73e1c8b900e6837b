"""Messages of a peer link survive being cut into pieces, and damage to them is noticed."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.protocol import peer_link
from allfold_core.protocol.frames import FrameError
from allfold_core.protocol.peer_link import (
    HEADER_SIZE,
    MAX_BODY,
    Chosen,
    Floor,
    GroupMessage,
    GroupProgress,
    Hello,
    LinkMessage,
    LinkMessageType,
    LinkReader,
    Ping,
    Pong,
)

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
GROUP_TYPES = st.sampled_from([each for each in LinkMessageType if each > LinkMessageType.PONG])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PROGRESS = st.lists(st.builds(GroupProgress, NAMES, U32, I64, I64, U64), max_size=4).map(tuple)
WAITED_FOR = st.lists(NAMES, max_size=3).map(tuple)
FLOORS = st.lists(st.builds(Floor, NAMES, U32, I64, WAITED_FOR), max_size=4).map(tuple)
MESSAGES: st.SearchStrategy[LinkMessage] = st.one_of(
    st.builds(Hello, NAMES, NAMES),
    st.builds(Chosen, U64),
    st.builds(Ping, U64, PROGRESS),
    st.builds(Pong, U64, FLOORS),
    st.builds(
        GroupMessage,
        GROUP_TYPES,
        NAMES,
        U32,
        st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    ),
)
PING = Ping(7, (GroupProgress("train", 3, 11, 12, 99), GroupProgress("größe", 4, -1, -1, 0)))


def read(data: bytes | bytearray) -> list[LinkMessage]:
    return list(LinkReader().feed(data))


def message_with(kind: int, body: bytes, length: int | None = None) -> bytes:
    """A message with correct checksums, whatever it says."""
    size = len(body) if length is None else length
    header = struct.pack("<HBxII", peer_link.MAGIC, kind, size, zlib.crc32(body))
    return header + struct.pack("<I", zlib.crc32(header)) + body


@given(st.lists(MESSAGES, max_size=6), st.lists(U16, max_size=8))
def test_messages_come_out_as_they_went_in_however_their_bytes_are_cut(
    messages: list[LinkMessage], cuts: list[int]
) -> None:
    data = b"".join(message.pack() for message in messages)
    reader, got = LinkReader(), list[LinkMessage]()
    places = sorted(cut % (len(data) + 1) for cut in cuts)
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        got += reader.feed(data[start:end])
    assert got == messages


@given(st.data(), st.integers(1, 255))
def test_one_damaged_byte_is_noticed_before_the_message_is_believed(
    data: st.DataObject, change: int
) -> None:
    packed = bytearray(PING.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= change
    with pytest.raises(FrameError):
        read(packed)


def test_each_byte_of_the_header_is_covered_by_a_check() -> None:
    for place in range(HEADER_SIZE):
        packed = bytearray(PING.pack())
        packed[place] ^= 1
        with pytest.raises(FrameError):
            read(packed)


def test_messages_before_a_damaged_one_are_read() -> None:
    messages = LinkReader().feed(PING.pack() + Chosen(1).pack() + b"\0" * HEADER_SIZE)
    assert [next(messages), next(messages)] == [PING, Chosen(1)]
    with pytest.raises(FrameError):
        next(messages)


def test_a_message_is_not_read_before_it_is_complete() -> None:
    packed = PING.pack()
    for length in range(len(packed)):
        assert read(packed[:length]) == []


def test_a_header_that_announces_too_much_is_refused_before_the_body_comes() -> None:
    header = message_with(LinkMessageType.FREEZE, b"", MAX_BODY + 1)
    with pytest.raises(FrameError, match=f"{MAX_BODY + 1} bytes"):
        read(header)


def test_a_message_that_is_too_long_is_not_made() -> None:
    with pytest.raises(FrameError, match="FREEZE has"):
        GroupMessage(LinkMessageType.FREEZE, "train", 1, {"text": "x" * MAX_BODY}).pack()


@pytest.mark.parametrize(
    ("kind", "body", "why"),
    [
        (0, b"", "unknown type: 0"),
        (99, b"", "unknown type: 99"),
        (LinkMessageType.HELLO, b"[]", "list"),
        (LinkMessageType.HELLO, b"{", "HELLO cannot be read"),
        (LinkMessageType.HELLO, b'{"node": "a"}', "incarnation"),
        (LinkMessageType.HELLO, b'{"node": "a", "incarnation": 1}', "int in place of a text"),
        (LinkMessageType.HELLO, b"[" * 200_000, "HELLO cannot be read"),
        (LinkMessageType.CHOSEN, b"1234", "CHOSEN cannot be read"),
        (LinkMessageType.CHOSEN, b"123456789", "1 bytes too many"),
        (LinkMessageType.PING, struct.pack("<QH", 1, 1), "PING cannot be read"),
        (
            LinkMessageType.PONG,
            struct.pack("<QH", 1, 1)
            + struct.pack("<IH", 1, 1)
            + b"g"
            + struct.pack("<qHH", 0, 1, 5)
            + b"node",
            "name is cut off",
        ),
        (LinkMessageType.DOWN, struct.pack("<IH", 1, 5) + b"abcd", "name is cut off"),
        (LinkMessageType.DOWN, struct.pack("<IH", 1, 1) + b"\xff{}", "DOWN cannot be read"),
        (LinkMessageType.DOWN, struct.pack("<IH", 1, 1) + b"g\xff", "DOWN cannot be read"),
    ],
)
def test_a_body_that_says_nothing_is_refused(kind: int, body: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        read(message_with(kind, body))


def test_an_answer_to_a_ping_says_how_far_all_are_and_whom_rounds_wait_for() -> None:
    pong = Pong(7, (Floor("train", 3, 11, ("b", "näher")), Floor("other", 4, -1, ())))
    assert list(LinkReader().feed(pong.pack())) == [pong]
