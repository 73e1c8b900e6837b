"""Whatever bytes come, a decoder has a value for them, or its one error."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_control import messages
from allfold_core.dtypes import Alias, DType
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.protocol import peer_link
from allfold_core.protocol.frames import (
    HEADER_SIZE,
    FrameError,
    FrameHeader,
    FrameType,
    SharedRange,
)
from allfold_core.protocol.peer_link import (
    MAX_BODY,
    Chosen,
    Floor,
    GroupMessage,
    GroupProgress,
    Hello,
    LinkMessageType,
    LinkReader,
    Ping,
    Pong,
)
from allfold_core.protocol.rank_messages import (
    FIRST_PAIR,
    Fence,
    Message,
    OpMessage,
    Outcome,
    P2PMessage,
    Region,
    pack_json,
    unpack_json,
)
from allfold_core.protocol.state_blocks import StateBlock
from allfold_core.schema import read_object
from allfold_service import credentials as tokens
from allfold_service.credentials import Tokens
from tests.fuzz.effort import tries
from tests.fuzz.mutations import mutated

# Of inputs of some 10 KiB, which Hypothesis prints where one fails.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

PRINT = Fingerprint(Kind.SCATTER, None, DType.FLOAT32, (3, 5), 1, "chain", counts=(4, 4, 7))
SUM = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.INT64, (9,), -1, "auto")
FRAMES = [
    FrameHeader(FrameType.DATA, 7 << 40, 3, 9, 0, 4096, 2**63, 77, 5).pack(),
    FrameHeader(FrameType.SHARED, 1, 0, 0, 0, 24, 1, 0).pack() + SharedRange(0, 1, 0, 8).pack(),
]
LINKS = [
    Hello("node-a", "3f").pack(),
    Chosen(3).pack(),
    Ping(7, (GroupProgress("train", 3, 11, 12, 99), GroupProgress("größe", 4, -1, -1, 0))).pack(),
    Pong(7, (Floor("train", 3, 11, ("node-b", "node-c")),)).pack(),
    GroupMessage(LinkMessageType.FREEZE, "train", 3, {"round": [1, {"a": None}]}).pack(),
]
FENCE = Fence(Region(1, 8), 5)
CALLS = [
    OpMessage(0, 3, 30.0, Region(0, 0), Region(1, 64), PRINT.pack()).pack(),
    OpMessage(0, 3, 30.0, Region(0, 0), Region(1, 64), b"", FENCE, 2).pack(),
    P2PMessage(Message.SEND, 0, FIRST_PAIR, 1.0, 1, 7, 1, Region(0, 0), 64, FENCE).pack(),
    P2PMessage(
        Message.RECV, 0, FIRST_PAIR, 1.0, 1, 7, 9, Region(0, 0), 64, alias=Alias("uint16", 2)
    ).pack(),
    Outcome(Message.DONE, 0, 3, 1, 2).pack(),
    Outcome(Message.FAILED, 0, 3, 1, body={"code": "AF302", "message": "lost"}).pack(),
    StateBlock(4 << 20, 4 << 20, 3).pack(),
    pack_json(Message.JOIN, {"group": "train", "rank": 0, "request": 1}),
]
_VOTER = {"incarnation": "1", "data_address": "a:1", "control_url": "http://a:2"}
_RECORD = {
    "epoch": 1,
    "term": {"number": 1, "generation": 1, "voters": ["a"], "joined": [1]},
    "voters": {"a": _VOTER},
    "seats": [["a", "s0"]],
    "generation": 1,
}
_LIFE = {"node": "b", "incarnation": "1"}
UP = [
    {"type": "register", "generation": 1, "incarnation": "1", "groups": []},
    {
        "type": "register",
        "generation": 1,
        "incarnation": "1",
        "groups": [{"group": "g", "record": _RECORD, "is_out": False}],
    },
    {"type": "beat", "number": 3, "lag": 0.1, "heard": {"b": 1.0}, "progress": []},
    {"type": "suspect", **_LIFE, "kind": "silent", "since": 1.0, "lag": 0.1},
    {"type": "withdraw", **_LIFE, "kind": "stuck"},
    {"type": "alive", "nonce": "n", "lag": 0.5},
    {"type": "join", "number": 3, "body": {"group": "g", "rank": 0}},
]
PACKED = base64.b64encode(gzip.compress(b'{"plan":{"epoch":1}}')).decode()
ANSWER = {"type": "answer", "numbers": [1], "status": 200, "body": {"epoch": 1}}
DOWN: list[dict[str, Any]] = [
    {"type": "registered", "generation": 1, "is_evicted": False, "out": ["g"]},
    {"type": "beat", "number": 3},
    {"type": "term", "generation": 1, "group": "g", "record": _RECORD},
    {"type": "probe", "nonce": "n"},
    {"type": "cleared", **_LIFE, "patience": 1.5},
    ANSWER,
    {**ANSWER, "body": PACKED},
    {"type": "drain"},
]
JSON_UP = [json.dumps(each).encode() for each in UP]
JSON_DOWN = [json.dumps(each).encode() for each in DOWN]
DEEP = [b"[" * 60_000, b'{"a":' * 60_000, b'{"a":' * 990 + b"1" + b"}" * 990]
NUMBERS = [b'{"a":1e999}', b'{"a":NaN}', b'{"a":-Infinity}', b"1" * 5000, b'{"a":"\\ud800"}']


@tries(250)
@given(mutated(FRAMES))
def test_a_frame_header_is_read_or_refused(data: bytes) -> None:
    body = data[: HEADER_SIZE - 4]
    for each in (data, body + struct.pack("<I", zlib.crc32(body))):  # as damaged, and as meant
        try:
            header = FrameHeader.unpack(each)
        except FrameError:
            continue
        assert FrameHeader.unpack(header.pack()) == header


def with_checksums(data: bytes) -> bytes:
    """A message whose checksums are right, whatever is in it."""
    head, body = bytearray(data[:7]), data[peer_link.HEADER_SIZE :]
    head[3:7] = b"\0" + len(body).to_bytes(4, "little")[:3]
    kind = data[2] if len(data) > 2 else 0
    header = struct.pack("<HBxII", peer_link.MAGIC, kind, len(body), zlib.crc32(body))
    return header + struct.pack("<I", zlib.crc32(header)) + body


@tries(250)
@given(mutated(LINKS), st.integers(1, 50), st.booleans())
def test_messages_of_a_link_are_read_or_refused(data: bytes, step: int, repaired: bool) -> None:
    reader, data = LinkReader(), with_checksums(data) if repaired else data
    try:
        for start in range(0, len(data), step):
            for message in reader.feed(data[start : start + step]):
                assert list(LinkReader().feed(message.pack())) == [message]
    except FrameError:
        return


def test_a_link_keeps_no_more_than_the_longest_message() -> None:
    header = struct.pack("<HBxII", peer_link.MAGIC, LinkMessageType.HELLO, MAX_BODY + 1, 0)
    with pytest.raises(FrameError, match="more than"):
        list(LinkReader().feed(header + struct.pack("<I", zlib.crc32(header))))


@tries(250)
@given(mutated(CALLS))
def test_messages_of_the_local_socket_are_read_or_refused(data: bytes) -> None:
    for decode in (
        OpMessage.unpack,
        P2PMessage.unpack,
        Outcome.unpack,
        StateBlock.unpack,
        unpack_json,
    ):
        try:
            decode(data)
        except ValueError:
            continue


@tries(150)
@given(
    mutated(
        [
            PRINT.pack(),
            Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.INT64, (9,), -1, "auto").pack(),
        ]
    )
)
def test_a_fingerprint_is_read_or_refused(data: bytes) -> None:
    try:
        found = Fingerprint.unpack(data)
    except ValueError:
        return
    assert Fingerprint.unpack(found.pack()).pack() == found.pack()


@tries(200)
@given(mutated(JSON_UP + DEEP + NUMBERS))
def test_the_orchestrator_reads_or_refuses_messages_of_a_control_link(data: bytes) -> None:
    try:
        messages.from_agent(data.decode("latin-1"))
    except ValueError:
        return


@tries(200)
@given(mutated(JSON_DOWN + DEEP + NUMBERS))
def test_an_agent_reads_or_refuses_messages_of_a_control_link(data: bytes) -> None:
    for each in (data, data.decode("latin-1")):
        try:
            messages.from_orchestrator(each)
        except ValueError:
            continue


@tries(150)
@given(mutated([gzip.compress(b'{"plan":{"epoch":1}}')]))
def test_a_packed_body_is_read_or_refused(data: bytes) -> None:
    body = {**ANSWER, "body": base64.b64encode(data).decode()}
    try:
        messages.from_orchestrator(json.dumps(body))
    except ValueError:
        return


def test_a_packed_body_takes_no_more_memory_than_a_plan_may() -> None:
    bomb = gzip.compress(bytes(1 << 28), 9)
    body = {**ANSWER, "body": base64.b64encode(bomb).decode()}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than"):
            messages.from_orchestrator(json.dumps(body))
        assert tracemalloc.get_traced_memory()[1] < 150 << 20
    finally:
        tracemalloc.stop()


@tries(150)
@given(mutated(DEEP + NUMBERS + JSON_UP))
def test_json_is_an_object_or_a_value_error(data: bytes) -> None:
    try:
        assert isinstance(read_object(data), dict)
    except ValueError:
        return


@tries(100)
@given(st.text(), st.text(st.characters(max_codepoint=255)))
def test_tokens_are_read_compared_or_refused(text: str, header: str) -> None:
    try:
        found = tokens.parse(text, "test")
    except InvalidArgument:
        return
    accepting = Tokens(",".join(found))
    assert accepting.accept(header) == (tokens.bearer(header) in found)
    assert all(accepting.accept(f"Bearer {each}") for each in found)
