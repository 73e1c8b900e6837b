"""Edges between two nodes: what is sent arrives once, whatever happens to the connections."""

from __future__ import annotations

import random
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import pytest
import torch

from allfold_agent.buffers import BufferPool
from allfold_agent.dataflow import build
from allfold_agent.exchange import Exchange, Outgoing
from allfold_agent.folding import Arithmetic
from allfold_agent.in_edge import Dial, InEdge
from allfold_agent.job import Job
from allfold_agent.out_edge import OutEdge
from allfold_agent.reactor import Reactor
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.frames import FrameHeader
from allfold_core.operations import Fingerprint, Kind
from allfold_core.parts import End, Layout, Part
from allfold_core.schedule import Program, Receive, Send, Slice

NUMEL = 50_000
CHUNK = 3_000
EPOCH = 7
FINGERPRINT = 1234
DEADLINE = 20.0


def content(seq: int) -> torch.Tensor:
    return torch.full((NUMEL,), float(seq)) + torch.arange(NUMEL)


class Side:
    """The ops of one node, and what its in-edge reports."""

    def __init__(self, count: int, program: Program, node: int) -> None:
        self.buffers = BufferPool(keep=1 << 30)
        self.done = [Event() for _ in range(count)]
        self.lost: list[AllfoldError] = []
        self.incoherences: list[AllfoldError] = []
        self.problem = Event()
        fingerprint = Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (NUMEL,), 0, "auto")
        arithmetic = Arithmetic(fingerprint, 2)
        flow = build(program, node=node, numel=NUMEL, chunk=CHUNK)
        whole = Part(Slice(0, NUMEL), (End(0, 0),), (End(0, 0),))
        layout = Layout((whole,), None, NUMEL, NUMEL)
        self.exchanges = [
            Exchange(
                flow,
                Job(layout, arithmetic, {0: content(seq)}, {}),
                self.buffers,
                on_sendable=lambda _: None,
                on_receivable=lambda _: None,
                on_finished=done.set,
                on_failed=lambda error: pytest.fail(repr(error)),
            )
            for seq, done in enumerate(self.done)
        ]

    def sink_for(self, source: int, header: FrameHeader, seconds: float) -> Exchange | None:
        return self.exchanges[header.seq]

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        self.lost.append(error)
        self.problem.set()

    def incoherent(self, seq: int, error: AllfoldError) -> None:
        self.incoherences.append(error)
        self.problem.set()


class Wire:
    """Connections that break after a number of bytes; ``None`` lets one live."""

    def __init__(self, edge: OutEdge, budgets: Iterator[int | None]) -> None:
        self.connections = 0
        self._edge = edge
        self._budgets = budgets
        self._relays: list[Thread] = []

    def dial(self, from_frame: int) -> tuple[socket.socket, bytes]:
        self.connections += 1
        take = self._edge.attach(from_frame)
        near, sending = socket.socketpair()
        receiving, far = socket.socketpair()
        take(sending)
        relay = Thread(target=_relay, args=(near, receiving, next(self._budgets)), daemon=True)
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
    out_edge = OutEdge(1, EPOCH, "test-0-1")
    for seq, exchange in enumerate(sender.exchanges):
        out_edge.enqueue(Outgoing(exchange, 1, seq, FINGERPRINT))
        for task in exchange.start():
            exchange.contribute(task)
    wire = Wire(out_edge, budgets)
    reactor = Reactor("test")
    reactor.start()
    in_edge = InEdge(0, EPOCH, "test-0-1", dial(wire), receiver, reactor)
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
    for seq, exchange in enumerate(receiver.exchanges):
        assert receiver.done[seq].wait(DEADLINE), f"op {seq} was not received"
        assert exchange.work.equal(content(seq))


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


def test_a_connection_that_is_cut_inside_every_header_still_makes_progress() -> None:
    # One chunk, its header and a bit of the next header; then the end, again and again.
    with pair(1, forever(CHUNK * 4 + 80)) as (_, receiver, wire, _edge):
        check_results(receiver)
        assert wire.connections >= NUMEL // CHUNK


def test_an_edge_that_cannot_be_opened_again_is_reported_as_lost() -> None:
    def dial_once(wire: Wire) -> Dial:
        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            if wire.connections:
                raise PeerLost("refused")
            return wire.dial(from_frame)

        return dial

    with pair(1, forever(1000), dial_once) as (_, receiver, _wire, _edge):
        assert receiver.problem.wait(DEADLINE)
        assert isinstance(receiver.lost[0], PeerLost)
        assert not receiver.done[0].is_set()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def test_a_damaged_payload_is_noticed() -> None:
    def dial_with_damage(wire: Wire) -> Dial:
        def dial(from_frame: int) -> tuple[socket.socket, bytes]:
            if from_frame:
                raise PeerLost("the test has ended")
            sending, far = _tcp_pair()
            wire._edge.attach(from_frame)(sending)
            first = bytearray(far.recv(500, socket.MSG_WAITALL))
            first[300] ^= 1
            return far, bytes(first)

        return dial

    with pair(1, forever(None), dial_with_damage) as (_, receiver, _wire, _edge):
        assert receiver.problem.wait(DEADLINE)
        assert "its digest differs" in str(receiver.incoherences[0])
        assert not receiver.done[0].is_set()


def test_memory_goes_back_to_the_pool_when_the_frames_are_acknowledged() -> None:
    with pair(3, forever(None)) as (sender, receiver, _wire, _edge):
        check_results(receiver)
        for exchange in sender.exchanges:
            exchange.release()
    reused = {id(sender.buffers.take(NUMEL * 4)) for _ in range(3)}
    assert reused == {id(exchange.buffer) for exchange in sender.exchanges}
