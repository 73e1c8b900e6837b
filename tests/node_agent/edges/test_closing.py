"""Edges that are closed end, whatever they wait for, and those that wait have no thread."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from threading import Thread
from threading import enumerate as enumerate_threads

import pytest

from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.edges.outgoing import Payload, PayloadSource
from allfold_agent.execution.transfers import SliceLanding
from allfold_agent.p2p.messages import content_frames
from allfold_agent.runtime.reactor import Action, Reactor
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import ACK, HEADER_SIZE, FrameHeader
from allfold_core.schedules.schedule import Receive, Send, Slice
from tests.node_agent.edges.edge_ends import DEADLINE, KIB, Feed, Side, frames_of
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.fakes.local_groups import local_groups
from tests.support.waiting import wait_until


def test_an_edge_that_is_closed_takes_no_connection(reactor: Reactor) -> None:
    edge = OutEdge("b", reactor)
    edge.close()
    with pytest.raises(PeerLost, match="this edge is closed"):
        edge.attach(0)


def test_an_edge_that_waits_for_the_memory_of_a_frame_ends_when_it_is_closed(
    reactor: Reactor,
) -> None:
    """The op may have seconds left until its deadline, and more."""
    numel = 300 * KIB // 4
    whole = Slice(0, numel)
    receiver = Side(1, (Send(whole, 2), Receive(whole, 0)), 1, numel=numel, chunk=numel)
    near, far = tcp_pair()
    near.settimeout(DEADLINE)
    with near:
        in_edge = InEdge("a", "test-a-b", lambda _: (far, b""), receiver, reactor)
        near.sendall(frames_of(numel, numel)[0][: HEADER_SIZE + 1])
        feed = Feed(near, far)
        wait_until(lambda: feed.waiting() <= 1, "its header is read", DEADLINE)
        in_edge.close()
        assert far.fileno() < 0, "its connection is closed"


def test_a_sender_that_nobody_reads_from_ends_when_it_is_closed(reactor: Reactor) -> None:
    edge = OutEdge("b", reactor)
    memory = memoryview(bytes(64 << 20))
    edge.enqueue(content_frames(7, memory))
    ours, theirs = socket.socketpair()
    with ours:
        edge.attach(0)(theirs)
        wait_until(lambda: edge.counters.frames, "the first frames are written", DEADLINE)
        edge.close()
        wait_until(lambda: theirs.fileno() < 0, "its connection is closed", DEADLINE)


class Failing:
    """Memory that cannot be read so many times, as there is none for its copy."""

    def __init__(self, source: PayloadSource, times: int) -> None:
        self._take, self._times = source.take, times
        source.take = self.take  # type: ignore[method-assign]

    def take(self) -> Payload | None:
        payload = self._take()
        if payload is not None:
            read = payload.read
            payload.read = lambda: self._read(read)
        return payload

    def _read(self, read: Callable[[], memoryview | bytes]) -> memoryview | bytes:
        self._times -= 1
        if self._times >= 0:
            raise MemoryError
        return read()


def test_a_frame_that_could_not_be_made_goes_out_on_the_next_connection(reactor: Reactor) -> None:
    """An edge that stayed as it is would send nothing any more."""
    edge = OutEdge("b", reactor)
    source = content_frames(7, memoryview(bytes(range(100))))
    Failing(source, times=1)
    edge.enqueue(source)
    first, theirs = socket.socketpair()
    with first:
        edge.attach(0)(theirs)
        wait_until(lambda: theirs.fileno() < 0, "its connection is closed", DEADLINE)
    second, theirs = socket.socketpair()
    second.settimeout(DEADLINE)
    with second:
        edge.attach(0)(theirs)
        header = FrameHeader.unpack(second.recv(HEADER_SIZE, socket.MSG_WAITALL))
        assert (header.number, header.length) == (0, 100)
        assert second.recv(100, socket.MSG_WAITALL) == bytes(range(100))
        edge.close()


def test_an_edge_whose_frame_can_never_be_made_is_refused_to_its_peer(reactor: Reactor) -> None:
    edge = OutEdge("b", reactor)
    source = content_frames(7, memoryview(bytes(range(100))))
    Failing(source, times=100)
    edge.enqueue(source)

    def is_refused() -> bool:
        ours, theirs = socket.socketpair()
        with ours:
            try:
                take = edge.attach(0)
            except PeerLost as error:
                theirs.close()
                return "cannot be sent the next frame" in str(error)
            take(theirs)
            wait_until(lambda: theirs.fileno() < 0, "its connection is closed", DEADLINE)
        return False

    wait_until(is_refused, "the edge takes no connection any more", DEADLINE)
    edge.close()


def test_a_frame_that_has_arrived_is_acknowledged_before_its_edge_ends(reactor: Reactor) -> None:
    """Its sender waits for that before it lets go of the memory."""
    receiver = Side(1, (Receive(Slice(0, 10), 0),), 1, numel=10, chunk=10)
    ours, theirs = tcp_pair()
    ours.settimeout(DEADLINE)
    with ours:
        in_edge = InEdge("a", "test-a-b", lambda _: (theirs, b""), receiver, reactor)
        closing = Thread(target=in_edge.close)
        receiver.receivers[0].received = partial(  # type: ignore[method-assign]
            _then, receiver.receivers[0].received, closing.start
        )
        ours.sendall(frames_of(10, 10)[0])
        assert ours.recv(100) == ACK.pack(1)
        assert ours.recv(100) == b""
        closing.join(DEADLINE)


def _then(received: Callable[[SliceLanding], None], then: Action, landing: SliceLanding) -> None:
    received(landing)
    then()


def test_an_edge_that_waits_for_something_to_be_sent_or_received_has_no_thread() -> None:
    with local_groups([[0], [1]]) as local:
        local.call_all(0, [[1.0], [2.0]])
        assert [rank.outcome() for rank in local.ranks] == [(0, None)] * 2
        wait_until(lambda: not threads_of_edges(), "the threads that opened them have ended")


def threads_of_edges() -> list[str]:
    kinds = ("allfold-dial-", "allfold-send-", "allfold-receive-")
    return [each.name for each in enumerate_threads() if each.name.startswith(kinds)]
