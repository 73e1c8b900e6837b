"""Connections that are paced: everything comes, in order, and never more than the cap allows."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Event
from time import monotonic

import pytest

from allfold_agent.edges.out_connection import OutConnection
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.op_edges import OpSender
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_agent.runtime.reactor import Reactor
from allfold_agent.traffic.line import Sender, TcpLine
from allfold_agent.traffic.pacer import Pacer
from allfold_agent.traffic.rates import CHUNK_SECONDS
from allfold_core.protocol.frames import HEADER_SIZE, FrameHeader, FrameType
from allfold_core.protocol.traffic import Cap, TrafficClass, level_of
from allfold_core.schedules.schedule import Send, Slice
from tests.node_agent.edges.edge_ends import CHUNK, FINGERPRINT, NUMEL, STAMP, Side
from tests.node_agent.groups.lane_ends import End
from tests.node_agent.in_lane import in_thread
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until

RATE = 1_000_000
OPS = 2
FRAMES = OPS * -(-NUMEL // CHUNK)
NBYTES = OPS * 4 * NUMEL + FRAMES * HEADER_SIZE


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.close()


def sent_over(edge: OutEdge) -> Side:
    """Have an edge send some ops."""
    side = Side(OPS, (Send(Slice(0, NUMEL), 1),), 0)
    for seq, executor in enumerate(side.exchanges):
        edge.enqueue(OpSender(executor, 1, seq, STAMP, FINGERPRINT))
        for task in executor.start():
            executor.contribute(task)
    return side


def read(connected: socket.socket, nbytes: int, rate: float, began: float) -> None:
    """Read everything; what has come is never more than a rate allows since the beginning."""
    connected.settimeout(20.0)
    received = 0
    while received < nbytes:
        received += len(connected.recv(1 << 20))
        assert received <= rate * (monotonic() - began + CHUNK_SECONDS) + 1


def test_an_edge_keeps_to_its_cap_from_its_first_byte_and_sends_all(reactor: Reactor) -> None:
    pacer, began = Pacer("a", "", RATE, reactor.later), monotonic()
    edge = OutEdge("b", reactor, Sender(pacer, "g", "", level_of("normal")))
    near, far = tcp_pair()
    with closing(far):
        sent_over(edge)
        edge.attach(0)(near)
        read(far, NBYTES, RATE, began)
        edge.close()


def test_a_higher_cap_lets_an_edge_go_on_that_hardly_moved(reactor: Reactor) -> None:
    pacer = Pacer("a", "", 0, reactor.later)
    pacer.take([Cap(group="g", rate=64 * 1024)])
    edge = OutEdge("b", reactor, Sender(pacer, "g", "", level_of("normal")))
    near, far = tcp_pair()
    with closing(far):
        far.settimeout(20.0)
        sent_over(edge)
        edge.attach(0)(near)
        first = len(far.recv(1 << 20))
        pacer.take([])
        read(far, NBYTES - first, float("inf"), monotonic())
        edge.close()


@pytest.mark.parametrize("traffic", ["background", "high"])
def test_the_class_of_a_group_changes_nothing_of_what_comes(
    reactor: Reactor, traffic: TrafficClass
) -> None:
    pacer = Pacer("a", "", 0, reactor.later)
    edge = OutEdge("b", reactor, Sender(pacer, "g", "", level_of(traffic)))
    near, far = tcp_pair()
    with closing(far):
        sent_over(edge)
        edge.attach(0)(near)
        read(far, NBYTES, float("inf"), monotonic())
        edge.close()


@pytest.mark.parametrize("traffic", ["background", "normal"])
def test_the_short_lane_keeps_to_a_cap_as_well(reactor: Reactor, traffic: TrafficClass) -> None:
    thread = LaneThread("test")
    pacer, began = Pacer("a", "", RATE, reactor.later), monotonic()
    sender = End(thread, sender=Sender(pacer, "g", "", level_of(traffic)))
    receiver = End(thread)
    near, far = tcp_pair()
    sender.take_out(near)
    receiver.take_in(far)
    payloads = [bytes([number]) * 30_000 for number in range(8)]
    sender.send(*payloads)
    assert not in_thread(thread, lambda: sender.link.has_sent)
    wait_until(lambda: len(receiver.frames) == 8, "all have come")
    assert receiver.payloads == payloads
    assert RATE * (monotonic() - began + CHUNK_SECONDS) >= 8 * 30_000
    in_thread(thread, sender.link.close)
    in_thread(thread, receiver.link.close)
    thread.close()


def test_what_stays_on_this_machine_is_not_paced() -> None:
    pacer = Pacer("a", "", RATE, lambda *_: None)
    near, far = socket.socketpair()
    with closing(near), closing(far):
        assert Sender(pacer, "g", "", 1).open(near) is None


def test_a_connection_that_has_ended_is_forgotten(reactor: Reactor) -> None:
    pacer = Pacer("a", "", 0, reactor.later)
    normal = Sender(pacer, "g", "", level_of("normal"))
    near, far = tcp_pair()
    with closing(far):
        flow = normal.open(near)
        high_end, other = tcp_pair()
        connection = OutConnection(
            high_end, 0, reactor, lambda *_: None, Sender(pacer, "h", "", level_of("high"))
        )
        assert flow is not None
        assert flow.is_paced
        connection.close()
        assert not flow.is_paced
        other.close()
        near.close()


def test_a_line_tells_what_is_on_it() -> None:
    near, far = tcp_pair()
    with closing(near), closing(far):
        line = TcpLine(near)
        before = line.look()
        near.sendall(bytes(1000))
        far.recv(1000, socket.MSG_WAITALL)
        wait_until(lambda: (state := line.look()) is not None and not state.queued, "it is there")
        after = line.look()
        assert before is not None
        assert after is not None
        assert (after.segments - before.segments, after.acked - before.acked) == (1, 1000)
        assert (after.in_flight, before.queued) == (0, 0)
        assert 0 < after.round_trip < 1.0
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                near.send(bytes(1 << 20))
        full = line.look()
        assert full is not None
        assert full.queued > 0
    assert line.look() is None


class Kept:
    """Keeps what it is asked to do later."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def later(self, seconds: float, _task: Callable[[], None]) -> None:
        self.pauses.append(seconds)


def test_who_is_held_back_asks_again_after_a_pause_and_not_when_there_is_room(
    reactor: Reactor,
) -> None:
    kept = Kept()
    pacer = Pacer("a", "", 64 * 1024, kept.later)
    near, far = tcp_pair()
    with closing(far):
        served: list[int] = []
        connection = OutConnection(
            near, 0, reactor, lambda _, events: served.append(events), Sender(pacer, "g", "", 1)
        )
        header = FrameHeader(FrameType.DATA, 0, 0, 0, 0, 1 << 20, 0, 0, 0)
        connection.write(header, bytes(1 << 20))
        connection.await_room()
        connection.await_room()
        assert len(kept.pauses) == 1
        assert 0 < kept.pauses[0] <= 0.1
        assert connection.waits
        wait_until_idle(reactor)
        assert not served
        connection.close()


def test_what_a_full_socket_does_not_take_is_for_others() -> None:
    pacer = Pacer("a", "", 10**9, lambda *_: None)
    reactor = Reactor("test")  # which never runs
    near, far = tcp_pair()
    other, end = tcp_pair()
    with closing(near), closing(far), closing(end), closing(other):
        sender = Sender(pacer, "g", "", 1)
        flow = sender.open(other)
        assert flow is not None
        connection = OutConnection(near, 0, reactor, lambda *_: None, sender)
        burst = int(10**9 * CHUNK_SECONDS)
        wait_until(lambda: pacer._buckets["node"].fill(monotonic()) == burst, "it is full")
        pacer._buckets["node"].rate = 1e-9  # nothing comes from now on
        header = FrameHeader(FrameType.DATA, 0, 0, 0, 0, burst, 0, 0, 0)
        written = connection.write(header, bytes(burst))
        assert 0 < written < burst
        assert flow.ask(1 << 40) == burst - written
        connection.close()
        reactor.close()


def wait_until_idle(reactor: Reactor) -> None:
    """Return when the reactor has looked at everything that is ready."""
    for _ in range(3):
        done = Event()
        reactor.call(done.set)
        assert done.wait(20.0)
