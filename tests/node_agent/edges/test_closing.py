"""Edges that are closed: their threads end, whatever they wait for."""

from __future__ import annotations

import socket
from threading import enumerate as enumerate_threads

import pytest
import torch

from allfold_agent.edges.in_edge import InEdge
from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.p2p.messages import content_frames
from allfold_agent.runtime.reactor import Reactor
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import HEADER_SIZE
from allfold_core.schedules.schedule import Receive, Send, Slice
from tests.node_agent.edges.edge_ends import DEADLINE, KIB, Feed, Side, frames_of
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until


def test_an_edge_that_is_closed_takes_no_connection() -> None:
    edge = OutEdge("b", "test-a-b")
    edge.close()
    with pytest.raises(PeerLost, match="this edge is closed"):
        edge.attach(0)


def threads_of_the_edge() -> list[str]:
    return [each.name for each in enumerate_threads() if each.name.endswith("test-a-b")]


def test_an_edge_that_waits_for_the_memory_of_a_frame_ends_when_it_is_closed() -> None:
    """The op may have seconds left until its deadline, and more."""
    numel = 300 * KIB // 4
    whole = Slice(0, numel)
    receiver = Side(1, (Send(whole, 2), Receive(whole, 0)), 1, numel=numel, chunk=numel)
    near, far = tcp_pair()
    near.settimeout(DEADLINE)
    reactor = Reactor("test")
    reactor.start()
    with near:
        in_edge = InEdge("a", "test-a-b", lambda _: (far, b""), receiver, reactor)
        near.sendall(frames_of(numel, numel)[0][: HEADER_SIZE + 1])
        feed = Feed(near, far)
        wait_until(lambda: feed.waiting() <= 1, "its header is read", DEADLINE)
        in_edge.close()
        wait_until(lambda: not threads_of_the_edge(), "its thread has ended", DEADLINE)
        reactor.close()


def test_a_sender_that_nobody_reads_from_ends_when_it_is_closed() -> None:
    edge = OutEdge("b", "test-a-b")
    memory = torch.zeros(64 << 20, dtype=torch.uint8)
    edge.enqueue(content_frames(7, memory))
    ours, theirs = socket.socketpair()
    with ours:
        edge.attach(0)(theirs)
        wait_until(lambda: edge.counters.frames, "the first frames are written", DEADLINE)
        edge.close()
        wait_until(lambda: not threads_of_the_edge(), "its thread has ended", DEADLINE)
