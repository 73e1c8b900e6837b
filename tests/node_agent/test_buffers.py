"""Work buffers: held, used again, and sent from while they are held."""

from __future__ import annotations

import os
import socket
from time import monotonic

import pytest
from tests.support.waiting import wait_until

from allfold_agent.buffers import HUGE_PAGE, SMALLEST, Buffer, BufferPool
from allfold_agent.out_edge import Load, OutEdge
from allfold_core.frames import HEADER_SIZE, FrameType

LARGE = HUGE_PAGE
SECONDS = 10.0


def pool() -> BufferPool:
    return BufferPool(keep=1 << 30)


def test_a_released_buffer_is_used_again_and_a_held_one_is_not() -> None:
    buffers = pool()
    first, second = buffers.take(SMALLEST), buffers.take(SMALLEST)
    assert first is not second
    first.hold()
    first.release()
    assert buffers.take(SMALLEST) not in (first, second)
    first.release()
    assert buffers.take(SMALLEST) is first


def test_no_more_idle_memory_is_kept_than_the_pool_may_keep() -> None:
    buffers = BufferPool(keep=SMALLEST)
    first, second = buffers.take(SMALLEST), buffers.take(SMALLEST)
    first.release()
    second.release()
    assert buffers.take(SMALLEST) is first
    assert buffers.take(SMALLEST) is not second


def test_only_large_shared_buffers_are_files_and_they_are_kept_apart() -> None:
    buffers = pool()
    plain, shared = buffers.take(LARGE), buffers.take(LARGE, shared=True)
    assert plain.file is None
    assert shared.file is not None
    assert buffers.take(SMALLEST, shared=True).file is None
    shared.bytes[5] = 42
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
    buffer.bytes.fill_(1)


class Whole:
    """A cargo: all of a buffer in one frame."""

    seq = 0
    fingerprint = 0

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.taken = False

    def is_finished(self) -> bool:
        return self.taken

    def is_ready(self) -> bool:
        return not self.taken

    def next_size(self) -> int:
        return self._buffer.size

    def take(self) -> Load | None:
        self.taken = True
        view = self._buffer.view
        return Load(FrameType.DATA, 0, lambda: view, lambda: None, self._buffer.hold())


def received(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connected.recv(count - len(data))
    return data


def test_memory_that_the_receiver_has_not_read_is_not_used_again_when_the_edge_ends() -> None:
    buffers = pool()
    buffer = buffers.take(LARGE, shared=True)
    buffer.bytes.fill_(7)
    edge = OutEdge(1, 0, "test-0-1")
    edge.enqueue(Whole(buffer))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.settimeout(SECONDS)
        edge.attach(0)(ours)
        received(theirs, HEADER_SIZE)
        buffer.release()
        received(theirs, LARGE - 100_000)
        wait_until(lambda: edge.counters.frames == 1, "the rest is in the socket")
        edge.close()
        again = buffers.take(LARGE, shared=True)
        again.bytes.fill_(9)
        assert received(theirs, 100_000) == b"\x07" * 100_000


def test_an_edge_whose_receiver_is_gone_does_not_wait_until_the_deadline_for_its_word() -> None:
    buffers = pool()
    edge = OutEdge(1, 0, "test-0-1")
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
