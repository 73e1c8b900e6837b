"""Payloads that the receiver reads in the sender's memory, where both are on one machine."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from threading import Thread
from time import monotonic

import numpy as np
import pytest

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.edges.outgoing import SLOTS, SentFiles, SharedMemory
from allfold_agent.edges.received_files import MissingFile, ReceivedFiles
from allfold_agent.execution.op_edges import OpSender
from allfold_agent.runtime.buffers import SHARED_BYTES, Buffer, BufferPool
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.frames import FrameError, SharedRange
from allfold_core.schedules.schedule import Fold, Program, Receive, Send, Slice
from tests.node_agent.edges.edge_ends import DEADLINE, FINGERPRINT, STAMP, Side, content
from tests.support.fakes.relays import forward, relay
from tests.support.waiting import never

NUMEL = 1_000_003
CHUNK = 100_000
WHOLE = Slice(0, NUMEL)
COUNT = 3


class Path:
    """Connections through a relay, which counts what goes towards the receiver.

    Args:
        lives: so many bytes pass on each.
        passes_files: whether files go through, too.
    """

    def __init__(self, edge: OutEdge, lives: Iterator[int], *, passes_files: bool) -> None:
        self.connections = 0
        self.carried = 0
        self._edge = edge
        self._lives = lives
        self._passes_files = passes_files
        self._relays: list[Thread] = []

    def dial(self, from_frame: int) -> tuple[socket.socket, bytes]:
        take = self._edge.attach(from_frame)
        self.connections += 1
        near, sending = socket.socketpair()
        receiving, far = socket.socketpair()
        carry = relay if self._passes_files else self._carry
        thread = Thread(target=carry, args=(near, receiving, next(self._lives), None), daemon=True)
        thread.start()
        self._relays.append(thread)
        take(sending)
        return far, b""

    def _carry(self, near: socket.socket, far: socket.socket, _life: int, _: None) -> None:
        with near, far:
            back = Thread(target=forward, args=(far, near, 1 << 40), daemon=True)
            back.start()
            with suppress(OSError):
                while data := near.recv(65536):
                    self.carried += len(data)
                    far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)
            back.join()

    def join(self) -> None:
        for each in self._relays:
            each.join(DEADLINE)


@contextmanager
def sent(
    program: Program, lives: Iterator[int] | None = None, *, passes_files: bool = True
) -> Iterator[tuple[Side, Side, Path, OutEdge]]:
    """Some ops that node 0 has sent to node 1, which runs a program."""
    sender = Side(COUNT, (Send(WHOLE, 1),), 0, numel=NUMEL, chunk=CHUNK)
    receiver = Side(COUNT, program, 1, numel=NUMEL, chunk=CHUNK)
    reactor = Reactor("test")
    reactor.start()
    out_edge = OutEdge("b", reactor)
    for seq, executor in enumerate(sender.exchanges):
        out_edge.enqueue(OpSender(executor, 1, seq, STAMP, FINGERPRINT))
        for task in executor.start():
            executor.contribute(task)
    path = Path(out_edge, lives or repeat(1 << 40), passes_files=passes_files)
    in_edge = InEdge("a", "test-a-b", path.dial, receiver, reactor)
    try:
        yield sender, receiver, path, out_edge
    finally:
        out_edge.finish(monotonic() + 2.0)
        out_edge.close()
        in_edge.close()
        reactor.close()
        path.join()


def assert_right(receiver: Side, factor: int = 1) -> None:
    for seq, (done, executor) in enumerate(zip(receiver.done, receiver.exchanges, strict=True)):
        assert done.wait(DEADLINE), f"op {seq} is not done"
        assert np.array_equal(executor.work, content(seq, NUMEL) * factor)
    assert not receiver.incoherences
    assert not receiver.lost


PROGRAMS: dict[str, Program] = {"received": (Receive(WHOLE, 0),), "folded": (Fold(WHOLE, (0, 1)),)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_payloads_arrive_over_connections_that_break(program: str) -> None:
    order = random.Random(program)
    lives = iter(lambda: order.randrange(1, 1_000), None)
    with sent(PROGRAMS[program], lives) as (_, receiver, path, _):
        assert_right(receiver, factor=1 if program == "received" else 2)
        assert path.connections > 1


def test_where_files_do_not_pass_payloads_go_through_the_connection() -> None:
    with sent(PROGRAMS["received"], passes_files=False) as (_, receiver, path, _):
        assert_right(receiver)
        assert path.connections <= 2, "one is enough to see that"
        assert path.carried > 4 * NUMEL


def test_a_payload_is_not_acknowledged_before_it_was_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acknowledged: list[int] = []
    with sent(PROGRAMS["folded"]) as (_, receiver, _, out_edge):
        first = receiver.exchanges[0]
        real, number = first._arithmetic.fold, iter(range(1000))

        def fold(out: Array, operands: list[Array]) -> None:
            acknowledged.append(out_edge.acknowledged() - next(number))
            real(out, operands)

        monkeypatch.setattr(first._arithmetic, "fold", fold)
        assert_right(receiver, factor=2)
    assert acknowledged
    assert max(acknowledged) <= 0


@pytest.fixture
def files() -> Iterator[ReceivedFiles]:
    received = ReceivedFiles()
    yield received
    received.close()


def memory_file(nbytes: int, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.pwrite(descriptor, bytes(range(nbytes)), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_a_range_of_a_file_is_read_where_it_lies_and_again_when_it_is_asked_for_again(
    files: ReceivedFiles,
) -> None:
    files.add([memory_file(100)])
    for number, is_new in ((4, 1), (4, 1), (5, 0)):
        memory = files.memory(number, SharedRange(3, is_new, 10, 4))
        assert memory.tolist() == [10, 11, 12, 13]


def test_a_new_file_takes_the_place_of_the_one_before_it(files: ReceivedFiles) -> None:
    files.add([memory_file(100), memory_file(20)])
    files.memory(0, SharedRange(0, 1, 90, 10))
    assert len(files.memory(1, SharedRange(0, 1, 0, 20))) == 20
    with pytest.raises(FrameError, match="no file that has come"):
        files.memory(2, SharedRange(0, 0, 90, 10))


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (SharedRange(0, 1, 90, 11), "no file that has come"),
        (SharedRange(1, 0, 0, 1), "no file that has come"),
        (SharedRange(SLOTS, 1, 0, 1), "no slot"),
    ],
)
def test_what_is_in_no_file_is_no_frame(
    files: ReceivedFiles, place: SharedRange, what: str
) -> None:
    files.add([memory_file(100)])
    with pytest.raises(FrameError, match=what):
        files.memory(0, place)


def test_a_file_that_could_be_cut_is_not_mapped(files: ReceivedFiles) -> None:
    files.add([memory_file(100, seals=fcntl.F_SEAL_GROW)])
    with pytest.raises(FrameError, match="not sealed"):
        files.memory(0, SharedRange(0, 1, 0, 1))


def test_a_frame_whose_file_has_not_come_is_no_damage(files: ReceivedFiles) -> None:
    with pytest.raises(MissingFile):
        files.memory(0, SharedRange(0, 1, 0, 1))


def test_a_buffer_keeps_its_slot_until_there_are_more_buffers_than_slots() -> None:
    buffers, sent_files = BufferPool(1 << 30, never), SentFiles()
    every = [buffers.take(SHARED_BYTES, shared=True) for _ in range(SLOTS + 2)]
    for number, buffer in enumerate(every):
        place, file = sent_files.pass_range(buffer, 0, 1)
        assert (place.slot, place.is_new, file) == (number % SLOTS, True, buffer)

    def found(buffer: Buffer) -> tuple[int, bool, SharedMemory | None]:
        place, file = sent_files.pass_range(buffer, 0, 1)
        return place.slot, bool(place.is_new), file

    assert found(every[2]) == (2, False, None)
    assert [found(each) for each in every[-2:]] == [(0, False, None), (1, False, None)]
    assert found(every[0]) == (2, True, every[0]), "another one has its slot"
