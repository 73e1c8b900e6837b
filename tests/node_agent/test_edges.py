"""Edges between two nodes: what is sent arrives once, whatever happens to the connections."""

from __future__ import annotations

import fcntl
import random
import selectors
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic

import pytest
import torch
import xxhash
from tests.support.waiting import never, wait_until

from allfold_agent.buffers import BufferPool
from allfold_agent.dataflow import build, chunks
from allfold_agent.exchange import Exchange
from allfold_agent.folding import Arithmetic
from allfold_agent.in_edge import Dial, InEdge
from allfold_agent.job import Job
from allfold_agent.out_edge import OutEdge
from allfold_agent.outgoing import Outgoing
from allfold_agent.reactor import Reactor
from allfold_core.dtypes import DType
from allfold_core.errors import AllfoldError, PeerLost
from allfold_core.frames import HEADER_SIZE, FrameHeader, FrameType
from allfold_core.operations import Fingerprint, Kind
from allfold_core.parts import End, Layout, Part
from allfold_core.schedule import Await, Program, Receive, Send, Slice

NUMEL = 50_000
CHUNK = 3_000
EPOCH = 7
FINGERPRINT = 1234
DEADLINE = 20.0
KIB = 1 << 10


def content(seq: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), float(seq)) + torch.arange(numel)


class Side:
    """The ops of one node, and what its in-edge reports."""

    def __init__(
        self, count: int, program: Program, node: int, *, numel: int = NUMEL, chunk: int = CHUNK
    ) -> None:
        self.buffers = BufferPool(1 << 30, never)
        self.done = [Event() for _ in range(count)]
        self.lost: list[AllfoldError] = []
        self.incoherences: list[AllfoldError] = []
        self.problem = Event()
        fingerprint = Fingerprint(Kind.BROADCAST, None, DType.FLOAT32, (numel,), 0, "auto")
        arithmetic = Arithmetic(fingerprint, 2)
        flow = build(program, node=node, numel=numel, chunk=chunk)
        whole = Part(Slice(0, numel), (End(0, 0),), (End(0, 0),))
        layout = Layout((whole,), None, numel, numel)
        self.exchanges = [
            Exchange(
                flow,
                Job(layout, arithmetic, {0: content(seq, numel)}, {}),
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


def test_an_edge_that_is_closed_takes_no_connection() -> None:
    edge = OutEdge(1, EPOCH, "test-0-1")
    edge.close()
    with pytest.raises(PeerLost, match="this edge is closed"):
        edge.attach(0)


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


# Over TCP, where a payload arrives packet by packet


@contextmanager
def fed(numel: int, chunk: int, there: bytes = b"") -> Iterator[tuple[Side, Feed]]:
    """A node that receives one op of ``numel`` elements and then a signal, over TCP.

    What is ``there`` has arrived before the node begins to read.
    """
    receiver = Side(1, (Receive(Slice(0, numel), 0), Await(0)), 1, numel=numel, chunk=chunk)
    near, far = _tcp_pair()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.settimeout(DEADLINE)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    feed = Feed(near, far)
    feed.send(there)
    wait_until(lambda: feed.waiting() == len(there), "all of it has arrived", DEADLINE)

    def dial(from_frame: int) -> tuple[socket.socket, bytes]:
        if from_frame or far.fileno() < 0:
            raise PeerLost("the test has ended")
        return far, b""

    reactor = Reactor("test")
    reactor.start()
    with near:
        in_edge = InEdge(0, EPOCH, "test-0-1", dial, receiver, reactor)
        try:
            yield receiver, feed
        finally:
            in_edge.close()
            reactor.close()


class Feed:
    """The sending end of a connection whose receiving end can be looked at."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._near = near
        self._far = far

    def send(self, data: bytes) -> None:
        self._near.sendall(data)

    def send_and_wait(self, data: bytes) -> None:
        """Until the receiver has taken all of it from the socket."""
        self.send(data)
        wait_until(lambda: self.waiting() == 0, "all of it is taken", DEADLINE)

    def waiting(self) -> int:
        """Bytes that have arrived and that nobody has read."""
        return int.from_bytes(fcntl.ioctl(self._far, termios.FIONREAD, bytes(4)), sys.byteorder)

    def low_water(self) -> int:
        """How many bytes have to be there before the receiver is woken."""
        return self._far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    def window(self) -> int:
        """How many bytes may be sent before one is read."""
        info = self._far.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 68)
        return int.from_bytes(info[64:68], sys.byteorder)  # rcv_ssthresh


def frames_of(numel: int, chunk: int) -> list[bytes]:
    """The frames of an op of ``numel`` elements and a signal behind it, as they are sent."""
    cuts = [*chunks(Slice(0, numel), chunk), (0, 0)]
    memory = content(0, numel).numpy()
    found = []
    for number, (start, stop) in enumerate(cuts):
        payload = memory[start:stop].tobytes()
        kind = FrameType.DATA if payload else FrameType.SIGNAL
        digest = xxhash.xxh3_64_intdigest(payload) if payload else 0
        header = FrameHeader(kind, EPOCH, number, 0, start, len(payload), FINGERPRINT, digest)
        found.append(header.pack() + payload)
    return found


def check_fed(receiver: Side, numel: int) -> None:
    assert receiver.done[0].wait(DEADLINE), "the op and its signal were not received"
    assert receiver.exchanges[0].work.equal(content(0, numel))
    assert receiver.incoherences == []


@pytest.mark.parametrize("rest", [0, 4, 128 * KIB - 4, 128 * KIB])
def test_a_long_payload_that_comes_in_small_pieces_arrives_and_so_does_the_signal_behind_it(
    rest: int,
) -> None:
    """Whether or not it ends where the last good part does that its reader waits for."""
    numel = (1 << 20) // 4 + rest // 4
    order = random.Random(rest)
    data = b"".join(frames_of(numel, numel))
    with fed(numel, numel) as (receiver, feed):
        while data:
            size = order.choice([1, 3, 64, 500, 1448, 9000])
            feed.send(data[:size])
            data = data[size:]
        check_fed(receiver, numel)


@pytest.mark.parametrize("cut", [1, 4, HEADER_SIZE, HEADER_SIZE + 4, 128 * KIB, 128 * KIB + 1])
def test_a_long_payload_whose_last_bytes_come_late_arrives(cut: int) -> None:
    numel = (1 << 20) // 4 + 3
    long, signal = frames_of(numel, numel)
    with fed(numel, numel) as (receiver, feed):
        feed.send(long[:-cut])
        feed.send(long[-cut:])
        feed.send_and_wait(b"")  # what was held back until more is there was taken
        feed.send(signal)
        check_fed(receiver, numel)


def test_a_signal_behind_a_long_payload_that_was_read_at_once_is_not_waited_for() -> None:
    numel = 260 * KIB // 4
    long, signal = frames_of(numel, numel)
    with fed(numel, numel, there=long) as (receiver, feed):
        feed.send_and_wait(b"")
        feed.send(signal)
        check_fed(receiver, numel)


def test_a_signal_behind_a_short_payload_that_came_in_two_pieces_is_not_waited_for() -> None:
    numel = 200 * KIB // 4
    short, signal = frames_of(numel, numel)
    with fed(numel, numel) as (receiver, feed):
        feed.send_and_wait(short[: HEADER_SIZE + 8])
        feed.send_and_wait(short[HEADER_SIZE + 8 :])
        feed.send(signal)
        check_fed(receiver, numel)


@pytest.mark.parametrize("numel", [200 * KIB // 4, 4 << 20])
def test_a_reader_does_not_wait_for_more_than_its_peer_may_send(numel: int) -> None:
    """A connection's window is small at first; each would wait for the other."""
    payload, signal = frames_of(numel, numel)
    begun = HEADER_SIZE + 8
    with fed(numel, numel) as (receiver, feed):
        feed.send(payload[:begun])
        wait_until(lambda: feed.low_water() > HEADER_SIZE, "it waits for a good part", DEADLINE)
        assert feed.low_water() <= feed.window() / 2
        feed.send(payload[begun:] + signal)
        check_fed(receiver, numel)


@pytest.mark.parametrize("cut", [1, 20, HEADER_SIZE - 1])
def test_a_header_that_comes_in_two_pieces_behind_short_frames_is_not_waited_for(cut: int) -> None:
    """TCP cuts anywhere. What was read of a header already does not count for the next waking."""
    first, second, signal = frames_of(20, 10)
    with fed(20, 10) as (receiver, feed):
        feed.send_and_wait(first[: HEADER_SIZE + 8])
        feed.send_and_wait(first[HEADER_SIZE + 8 :])
        feed.send_and_wait(second + signal[:cut])
        feed.send(signal[cut:])
        check_fed(receiver, 20)
