"""Edges over TCP, where a payload arrives packet by packet."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from allfold_agent.edges.in_edge import InEdge
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import HEADER_SIZE
from allfold_core.schedules.schedule import Await, Receive, Slice
from tests.node_agent.edges.edge_ends import DEADLINE, KIB, Feed, Side, content, frames_of
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until


@contextmanager
def fed(numel: int, chunk: int, there: bytes = b"") -> Iterator[tuple[Side, Feed]]:
    """A node that receives one op of ``numel`` elements and then a signal, over TCP.

    What is ``there`` has arrived before the node begins to read.
    """
    receiver = Side(1, (Receive(Slice(0, numel), 0), Await(0)), 1, numel=numel, chunk=chunk)
    near, far = tcp_pair()
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
        in_edge = InEdge("a", "test-a-b", dial, receiver, reactor)
        try:
            yield receiver, feed
        finally:
            in_edge.close()
            reactor.close()


def check_fed(receiver: Side, numel: int) -> None:
    assert receiver.done[0].wait(DEADLINE), "the op and its signal were not received"
    assert np.array_equal(receiver.exchanges[0].work, content(0, numel))
    assert receiver.incoherences == []


@pytest.mark.parametrize("rest", [0, 4, 128 * KIB - 4, 128 * KIB])
def test_a_long_payload_that_comes_in_small_pieces_arrives_and_so_does_the_signal_behind_it(
    rest: int,
) -> None:
    """The payload may end with the last whole part that its reader waits for, or after it."""
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
