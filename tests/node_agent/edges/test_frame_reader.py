"""Frames out of the bytes of a connection: in order, none before its taker can have it."""

from __future__ import annotations

from typing import cast

import pytest
import xxhash

from allfold_agent.edges.connections import InConnection
from allfold_agent.edges.frame_reader import NOWHERE, FrameReader
from allfold_agent.edges.link_rate import LinkRate
from allfold_core.protocol.frames import HEADER_SIZE, FrameError, FrameHeader, FrameType

STAGE = 16 * 1024
SHORT, LONG = 3000, 100_000
MIB = 1 << 20


def content(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def frame(nbytes: int, number: int = 0, kind: FrameType = FrameType.DATA) -> bytes:
    payload = content(nbytes)
    digest = xxhash.xxh3_64_intdigest(payload)
    return FrameHeader(kind, 7, number, number, 0, nbytes, 99, digest, 0).pack() + payload


class Wire:
    """A connection on which the test puts bytes."""

    crosses_a_wire = True

    def __init__(self) -> None:
        self.there = bytearray()

    def receive_into(self, view: memoryview) -> int:
        count = min(len(view), len(self.there))
        view[:count] = self.there[:count]
        del self.there[:count]
        return count


class Taker:
    """Takes frames as soon as the test lets it.

    Attributes:
        wanted: the numbers of the frames whose payloads are not thrown away; all if ``None``.
        waits: True while no frame can be taken.
        asked: how often one was shown to it.
        taken: the numbers and payloads of the others.
    """

    def __init__(self) -> None:
        self.wanted: set[int] | None = None
        self.waits = False
        self.asked = 0
        self.taken: list[tuple[int, bytes]] = []

    def take(self, header: FrameHeader, payload: memoryview, *, is_shared: bool) -> bool:
        assert not is_shared
        self.asked += 1
        if not self.waits:
            self.taken.append((header.number, bytes(payload)))
        return not self.waits

    def begin(self, header: FrameHeader) -> memoryview | None:
        self.asked += 1
        if self.waits:
            return None
        is_wanted = self.wanted is None or header.number in self.wanted
        return memoryview(bytearray(header.length)) if is_wanted else NOWHERE

    def finish(self, header: FrameHeader, memory: memoryview) -> None:
        self.taken.append((header.number, bytes(memory)))


def reading(early: bytes = b"") -> tuple[FrameReader, Wire, Taker]:
    wire, taker = Wire(), Taker()
    return FrameReader(cast(InConnection, wire), taker, LinkRate(), STAGE, early), wire, taker


def receive_all(reader: FrameReader, wire: Wire) -> None:
    while wire.there:
        reader.receive()


def test_bytes_that_come_one_by_one_make_the_same_frames_as_those_that_come_at_once() -> None:
    sizes = [0, 10, SHORT, LONG, 5, STAGE, 0]
    data = b"".join(frame(size, number) for number, size in enumerate(sizes))
    expected = [(number, content(size)) for number, size in enumerate(sizes)]
    for step in (997, len(data)):
        reader, wire, taker = reading()
        for at in range(0, len(data), step):
            wire.there += data[at : at + step]
            receive_all(reader, wire)
        assert taker.taken == expected
    reader, _, taker = reading(early=data)
    reader.advance()
    assert taker.taken == expected, "also all that came with the opening"


@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_a_frame_that_has_to_wait_is_shown_again_and_what_is_behind_it_waits_too(
    nbytes: int,
) -> None:
    reader, wire, taker = reading()
    taker.waits = True
    wire.there += frame(nbytes) + frame(10, 1)
    reader.receive()
    assert (taker.asked, taker.taken) == (1, [])
    reader.advance()
    assert (taker.asked, taker.taken) == (2, [])
    taker.waits = False
    reader.advance()
    receive_all(reader, wire)
    assert taker.taken == [(0, content(nbytes)), (1, content(10))]


def test_of_a_payload_that_nobody_wants_nothing_is_kept_however_long_it_is() -> None:
    reader, wire, taker = reading()
    taker.wanted = {1}
    wire.there += frame(5 * MIB) + frame(LONG, 1)
    receive_all(reader, wire)
    assert taker.taken == [(0, b""), (1, content(LONG))]


def test_a_long_payload_does_not_keep_other_connections_waiting() -> None:
    reader, wire, taker = reading()
    wire.there += frame(5 * MIB)
    reader.receive()
    assert 3 * MIB < reader.missing < 5 * MIB, "it comes to its end in later turns"
    receive_all(reader, wire)
    assert taker.taken == [(0, content(5 * MIB))]


@pytest.mark.parametrize("nbytes", [SHORT, LONG])
@pytest.mark.parametrize("come", [0, 1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 1000])
def test_it_knows_how_many_bytes_are_missing(nbytes: int, come: int) -> None:
    reader, wire, _ = reading()
    whole = frame(nbytes)
    wire.there += whole[:come]
    reader.receive()
    assert reader.missing == (HEADER_SIZE if come < HEADER_SIZE else len(whole)) - come


@pytest.mark.parametrize("nbytes", [SHORT, LONG])
def test_a_damaged_payload_is_not_taken(nbytes: int) -> None:
    reader, wire, taker = reading()
    wire.there += frame(nbytes)
    wire.there[-1] ^= 4
    with pytest.raises(FrameError, match="damaged"):
        receive_all(reader, wire)
    assert taker.taken == []


def test_a_long_payload_names_no_memory() -> None:
    reader, wire, taker = reading()
    wire.there += frame(LONG, kind=FrameType.SHARED)
    with pytest.raises(FrameError, match="frame 0 names memory with 100000 bytes"):
        receive_all(reader, wire)
    assert taker.asked == 0
