"""Edges between two nodes: what is sent arrives once, whatever happens to the connections."""

from __future__ import annotations

import random
import re
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Semaphore, Thread
from time import monotonic

import numpy as np
import pytest

from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.opening import Dial
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.op_edges import OpSender
from allfold_agent.p2p.messages import PARCEL_BYTES, content_frames, control_frame
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import ACK, HEADER_SIZE, FrameHeader, FrameType
from allfold_core.schedules.schedule import Receive, Send, Slice
from tests.node_agent.edges.edge_ends import (
    CHUNK,
    DEADLINE,
    FINGERPRINT,
    NUMEL,
    STAMP,
    Side,
    content,
)
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until


class Wire:
    """Connections that break after a number of bytes; ``None`` lets one live."""

    def __init__(self, edge: OutEdge, budgets: Iterator[int | None]) -> None:
        self.connections = 0
        self._edge = edge
        self._budgets = budgets
        self._relays: list[Thread] = []

    def dial(self, from_frame: int) -> tuple[socket.socket, bytes]:
        take = self._edge.attach(from_frame)
        self.connections += 1
        budget = next(self._budgets)
        near, sending = socket.socketpair()
        receiving, far = socket.socketpair()
        take(sending)
        relay = Thread(target=_relay, args=(near, receiving, budget), daemon=True)
        relay.start()
        self._relays.append(relay)
        return far, b""

    def join(self) -> None:
        for relay in self._relays:
            relay.join(timeout=DEADLINE)


def _relay(sender: socket.socket, receiver: socket.socket, budget: int | None) -> None:
    """Pass bytes on in both directions, at most ``budget`` of them towards the receiver."""
    with selectors.DefaultSelector() as selector, sender, receiver:
        selector.register(sender, selectors.EVENT_READ, receiver)
        selector.register(receiver, selectors.EVENT_READ, sender)
        while budget is None or budget > 0:
            for key, _ in selector.select(timeout=DEADLINE):
                assert isinstance(key.fileobj, socket.socket)
                towards_receiver = key.fileobj is sender
                limit = 65536 if budget is None or not towards_receiver else min(budget, 65536)
                try:
                    data = key.fileobj.recv(limit)
                    key.data.sendall(data)
                except OSError:
                    return
                if not data:
                    return
                if budget is not None and towards_receiver:
                    budget -= len(data)


@contextmanager
def pair(
    count: int, budgets: Iterator[int | None], dial: Callable[[Wire], Dial] = lambda wire: wire.dial
) -> Iterator[tuple[Side, Side, Wire, InEdge]]:
    """Node 0 that has sent ``count`` ops to node 1."""
    whole = Slice(0, NUMEL)
    sender = Side(count, (Send(whole, 1),), 0)
    receiver = Side(count, (Receive(whole, 0),), 1)
    reactor = Reactor("test")
    reactor.start()
    out_edge = OutEdge("b", reactor)
    for seq, executor in enumerate(sender.exchanges):
        out_edge.enqueue(OpSender(executor, 1, seq, STAMP, FINGERPRINT))
        for task in executor.start():
            executor.contribute(task)
    wire = Wire(out_edge, budgets)
    in_edge = InEdge("a", "test-a-b", dial(wire), receiver, reactor)
    try:
        yield sender, receiver, wire, in_edge
    finally:
        out_edge.finish(monotonic() + 2.0)
        out_edge.close()
        in_edge.close()
        reactor.close()
        wire.join()


def forever(value: int | None) -> Iterator[int | None]:
    while True:
        yield value


def check_results(receiver: Side) -> None:
    for seq, executor in enumerate(receiver.exchanges):
        assert receiver.done[seq].wait(DEADLINE), f"op {seq} was not received"
        assert np.array_equal(executor.work, content(seq))


def test_ops_arrive_over_one_connection() -> None:
    with pair(5, forever(None)) as (_, receiver, wire, in_edge):
        check_results(receiver)
        assert wire.connections == 1
        assert in_edge.counters.payload_bytes == 5 * NUMEL * 4


@pytest.mark.parametrize("seed", range(5))
def test_broken_connections_lose_nothing_and_repeat_nothing(seed: int) -> None:
    order = random.Random(seed)
    total = 5 * NUMEL * 4
    budgets: list[int | None] = [order.randrange(1, total // 6) for _ in range(12)]
    with pair(5, iter([*budgets, *[None] * 50])) as (sender, receiver, wire, in_edge):
        check_results(receiver)
        assert wire.connections > 3, "the connections were never cut"
        assert in_edge.counters.payload_bytes == total, "a frame was delivered twice"
        for done in sender.done:
            assert done.wait(DEADLINE)


def test_only_an_edge_that_breaks_and_is_opened_again_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every edge ends with its group; that is no news."""
    caplog.set_level("INFO", "allfold_agent.edges")
    with pair(5, forever(None)) as (_, receiver, wire, _edge):
        check_results(receiver)
    assert caplog.messages == []
    with pair(5, iter([4 * NUMEL * 4, *[None] * 50])) as (_, receiver, wire, _edge):
        check_results(receiver)
        assert wire.connections == 2
        # The last frames may be there before the thread that opened the edge comes to say so.
        wait_until(lambda: any("is open again" in each for each in caplog.messages), "the news")
    # The sender says both too where it was writing at that moment.
    (message,) = (each for each in caplog.messages if not each.startswith("edge to node b "))
    assert re.fullmatch(r"edge test-a-b is open again, from frame \d+ on, after \d+\.\d s", message)
    told = [each.split(" ")[4] for each in caplog.messages if each.startswith("edge to node b ")]
    assert told in ([], ["broke,", "is"])


def test_a_connection_that_is_cut_inside_every_header_still_makes_progress() -> None:
    # One chunk, its header and a bit of the next header; then the end, again and again.
    with pair(1, forever(CHUNK * 4 + 80)) as (_, receiver, wire, _edge):
        check_results(receiver)
        assert wire.connections >= NUMEL // CHUNK


def test_an_edge_is_tried_again_until_it_is_closed() -> None:
    """Others decide if its node is lost: they can see more."""
    tried = Semaphore(0)

    def dial_once(wire: Wire) -> Dial:
        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            if wire.connections:
                tried.release()
                raise PeerLost("refused")
            return wire.dial(from_frame)

        return dial

    with pair(1, forever(1000), dial_once) as (_, receiver, _wire, _edge):
        for _ in range(5):
            assert tried.acquire(timeout=DEADLINE)
        assert receiver.lost == []
        assert not receiver.done[0].is_set()


def a_connection_that_was_reset() -> socket.socket:
    """The kernel knows no peer of it any more."""
    near, far = tcp_pair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    near.close()
    with pytest.raises(ConnectionResetError):
        far.recv(1)
    with pytest.raises(OSError, match="not connected"):
        far.getpeername()
    return far


def test_a_connection_that_is_reset_as_soon_as_it_is_open_is_opened_again() -> None:
    dead = [a_connection_that_was_reset(), a_connection_that_was_reset()]

    def dial(wire: Wire) -> Dial:
        return lambda from_frame: (dead.pop(), b"") if dead else wire.dial(from_frame)

    with pair(1, forever(None), dial) as (_, receiver, wire, _edge):
        check_results(receiver)
        assert receiver.lost == []
        assert wire.connections == 1


def test_a_sender_takes_a_connection_that_was_reset_already_and_sends_on_the_next_one(
    reactor: Reactor,
) -> None:
    edge = OutEdge("b", reactor)
    edge.enqueue(control_frame(FrameType.GRANT, 7))
    edge.attach(0)(a_connection_that_was_reset())
    receiving, sending = tcp_pair()
    with receiving:
        edge.attach(0)(sending)
        assert [frame.type for frame in read_frames(receiving, 1)] == [FrameType.GRANT]
        edge.close()


def test_what_is_urgent_goes_ahead_and_comes_again_in_the_order_in_which_it_was_sent(
    reactor: Reactor,
) -> None:
    """Frames are numbered as they are sent, so an edge resumes with the same ones."""
    edge = OutEdge("b", reactor)
    edge.enqueue(content_frames(7, memoryview(bytes(20 * PARCEL_BYTES))))
    first, sending = socket.socketpair()
    with first:
        edge.attach(0)(sending)
        wait_until(lambda: edge.counters.frames, "the first frames are written", DEADLINE)
        edge.enqueue(control_frame(FrameType.OFFER, 8))
        edge.enqueue(control_frame(FrameType.GRANT, 9), urgent=True)
        edge.enqueue(control_frame(FrameType.TAKEN, 9), urgent=True)
        frames = read_frames(first, 23)
    kinds = [frame.type for frame in frames]
    assert kinds.index(FrameType.GRANT) < 20
    assert kinds.index(FrameType.TAKEN) == kinds.index(FrameType.GRANT) + 1
    assert kinds[-1] is FrameType.OFFER
    assert [frame.number for frame in frames] == list(range(23))
    second, sending = socket.socketpair()
    with second:
        edge.attach(1)(sending)
        assert read_frames(second, 22) == frames[1:]
        edge.close()


def read_frames(connected: socket.socket, count: int) -> list[FrameHeader]:
    connected.settimeout(DEADLINE)
    headers = []
    with connected.makefile("rb") as stream:
        for _ in range(count):
            header = FrameHeader.unpack(stream.read(HEADER_SIZE))
            assert len(stream.read(header.length)) == header.length
            headers.append(header)
    return headers


def test_an_acknowledgement_of_what_was_never_sent_ends_the_connection(reactor: Reactor) -> None:
    edge = OutEdge("b", reactor)
    edge.enqueue(control_frame(FrameType.GRANT, 7))
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(DEADLINE)
        edge.attach(0)(theirs)
        assert len(ours.recv(HEADER_SIZE)) == HEADER_SIZE
        ours.send(ACK.pack(2))
        edge.finish(monotonic() + 0.5)
        assert ours.recv(1) == b""
    assert edge.attach(0) is not None, "the frame can still be asked for"
    edge.close()


def test_memory_goes_back_to_the_pool_when_the_frames_are_acknowledged() -> None:
    with pair(3, forever(None)) as (sender, receiver, _wire, _edge):
        check_results(receiver)
        for executor in sender.exchanges:
            executor.release()
    reused = {id(sender.buffers.take(NUMEL * 4)) for _ in range(3)}
    assert reused == {id(executor.buffer) for executor in sender.exchanges}
