"""Work buffers: held, used again, and sent from while they are held."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from time import monotonic

import pytest

from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.edges.outgoing import Payload
from allfold_agent.runtime.buffers import (
    HUGE_PAGE,
    LATELY_SECONDS,
    SMALLEST,
    Buffer,
    BufferPool,
    size_class,
)
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.frames import ACK, HEADER_SIZE, RANGE_SIZE, UNKNOWN_BEHIND, FrameType
from tests.support.waiting import never, wait_until

LARGE = HUGE_PAGE
SECONDS = 10.0


def pool() -> BufferPool:
    return BufferPool(1 << 30, never)


def test_a_released_buffer_is_used_again_and_a_held_one_is_not() -> None:
    buffers = pool()
    first, second = buffers.take(SMALLEST), buffers.take(SMALLEST)
    assert first is not second
    first.hold()
    first.release()
    assert buffers.take(SMALLEST) not in (first, second)
    first.release()
    assert buffers.take(SMALLEST) is first


@pytest.mark.parametrize("power", range(17, 37))
def test_a_buffer_wastes_at_most_an_eighth_and_is_whole_pages(power: int) -> None:
    for nbytes in (
        2**power - 1,
        2**power,
        2**power + 1,
        2**power * 65 // 64,
        2**power * 3 // 2 + 1,
    ):
        size = size_class(nbytes)
        assert nbytes <= size <= nbytes + nbytes / 8 + 1
        assert size % os.sysconf("SC_PAGE_SIZE") == 0
    assert size_class(2**power) == 2**power


def test_ops_of_similar_size_share_a_buffer() -> None:
    buffers = pool()
    first = buffers.take(65 << 20)
    assert first.size == 72 << 20
    first.release()
    assert buffers.take(70 << 20) is first
    assert buffers.take(64 << 20).size == 64 << 20


class Clock:
    """A time that passes when it is told to, and what was to be done after a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr("allfold_agent.runtime.buffers.monotonic", lambda: self.now)

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, task))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while ready := [each for each in self.due if each[0] <= until]:
            first = min(ready, key=lambda each: each[0])
            self.due.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = until


def test_what_was_used_lately_is_kept_and_of_the_rest_no_more_than_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    buffers = BufferPool(SMALLEST, clock.later)
    first, second, third = (buffers.take(SMALLEST) for _ in range(3))
    for buffer in (first, second, third):
        clock.advance(1.0)
        buffer.release()
    clock.advance(LATELY_SECONDS - 2.5)  # all were used within this time
    assert [buffers.take(SMALLEST) for _ in range(3)] == [third, second, first]
    for buffer in (first, second, third):
        buffer.release()
        clock.advance(1.0)
    clock.advance(LATELY_SECONDS)
    assert buffers.take(SMALLEST) is third, "that much may be kept"
    assert buffers.take(SMALLEST) not in (first, second)
    assert clock.due == []


def test_a_buffer_that_is_used_again_and_again_is_never_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    buffers = BufferPool(0, clock.later)
    first = buffers.take(LARGE)
    for _ in range(20):
        first.release()
        assert len(clock.due) == 1
        clock.advance(LATELY_SECONDS * 0.7)
        assert buffers.take(LARGE) is first


def test_only_large_shared_buffers_are_files_and_they_are_kept_apart() -> None:
    buffers = pool()
    plain, shared = buffers.take(LARGE), buffers.take(LARGE, shared=True)
    assert plain.file is None
    assert shared.file is not None
    assert buffers.take(SMALLEST, shared=True).file is None
    shared.view[5] = 42
    assert os.pread(shared.file, 1, 5) == b"\x2a"
    plain.release()
    assert buffers.take(LARGE, shared=True) not in (plain, shared)
    assert buffers.take(LARGE) is plain


def test_where_no_descriptor_is_left_a_shared_buffer_is_plain_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    buffer = pool().take(LARGE, shared=True)
    assert buffer.file is None
    buffer.view[:] = bytes([1]) * len(buffer.view)


class Whole:
    """A payload source: all of a buffer in one frame."""

    stamp = 0
    seq = 0
    fingerprint = 0
    behind = UNKNOWN_BEHIND

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.taken = False

    def is_finished(self) -> bool:
        return self.taken

    def is_ready(self) -> bool:
        return not self.taken

    def next_size(self) -> int:
        return self._buffer.size

    def next_is_shared(self) -> bool:
        return self._buffer.file is not None

    def take(self) -> Payload | None:
        self.taken = True
        view = self._buffer.view
        held, shared = self._buffer.hold(), self.next_is_shared()
        return Payload(FrameType.DATA, 0, lambda: view, lambda: None, held, is_shared=shared)


def received(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connected.recv(count - len(data))
    return data


def test_memory_that_the_receiver_may_still_read_is_not_used_again_when_the_edge_ends(
    reactor: Reactor,
) -> None:
    buffers = pool()
    buffer = buffers.take(LARGE, shared=True)
    buffer.view[:] = bytes([7]) * LARGE
    edge = OutEdge("b", reactor)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(SECONDS)
        theirs.sendall(ACK.pack(0))
        edge.attach(0)(ours)
        edge.enqueue(Whole(buffer))
        edge.kick()
        sent, (file,), _, _ = socket.recv_fds(theirs, HEADER_SIZE + RANGE_SIZE, 1)
        assert len(sent) == HEADER_SIZE + RANGE_SIZE, "the place of the payload and no more"
        buffer.release()
        edge.close()
        again = buffers.take(LARGE, shared=True)
        again.view[:] = bytes([9]) * LARGE
        assert os.pread(file, LARGE, 0) == b"\x07" * LARGE
        os.close(file)


def test_memory_that_is_not_needed_goes_back_to_the_system_where_others_have_it_mapped() -> None:
    buffer = pool().take(LARGE, shared=True)
    assert buffer.file is not None
    buffer.view[:] = bytes([7]) * LARGE
    with mmap.mmap(buffer.file, LARGE, prot=mmap.PROT_READ) as mapped:
        blocks = os.fstat(buffer.file).st_blocks
        buffer.discard()
        assert os.fstat(buffer.file).st_blocks < blocks
        assert mapped[:] == bytes(LARGE)


def test_an_edge_whose_receiver_is_gone_does_not_wait_until_the_deadline_for_its_word(
    reactor: Reactor,
) -> None:
    buffers = pool()
    edge = OutEdge("b", reactor)
    buffer = buffers.take(SMALLEST)
    ours, theirs = socket.socketpair()
    edge.attach(0)(ours)
    edge.enqueue(Whole(buffer))
    edge.kick()
    wait_until(lambda: edge.counters.frames == 1, "it is sent")
    theirs.close()
    deadline = monotonic() + 60.0
    edge.finish(deadline)
    assert monotonic() < deadline
    edge.close()
