"""Ops that are given up while their frames are on the way: later ones go on."""

from __future__ import annotations

import socket

from allfold_agent.edges.out_edge import OutEdge
from allfold_agent.execution.op_edges import OpSender
from allfold_agent.runtime.reactor import Reactor
from allfold_core.protocol.frames import HEADER_SIZE, FrameHeader
from allfold_core.schedules.schedule import Send, Slice
from tests.node_agent.edges.edge_ends import CHUNK, DEADLINE, FINGERPRINT, STAMP, Side
from tests.support.waiting import wait_until

LONG = 500_000


def test_what_was_not_sent_of_an_op_that_is_given_up_never_is_and_the_next_op_follows(
    reactor: Reactor,
) -> None:
    """Frames that have a number already are sent: the receiver has to get every number."""
    sender = Side(2, (Send(Slice(0, LONG), 1),), 0, numel=LONG)
    edge = OutEdge("b", reactor)
    ours, theirs = socket.socketpair()
    with ours:
        edge.attach(0)(theirs)
        for seq, executor in enumerate(sender.exchanges):
            edge.enqueue(OpSender(executor, 1, seq, STAMP + seq, FINGERPRINT))
            for task in executor.start():
                executor.contribute(task)
        edge.wake()
        wait_until(lambda: edge.counters.frames, "the sender is at work", DEADLINE)
        sender.exchanges[0].fail(lambda: None)
        sender.exchanges[0].release()
        edge.wake()
        frames = read_frames(ours, until=LONG)
        edge.close()
    given_up = [frame for frame in frames if frame.seq == 0]
    kept = [frame for frame in frames if frame.seq == 1]
    assert 0 < len(given_up) < len(kept) == -(-LONG // CHUNK)
    assert frames == given_up + kept
    assert {frame.stamp for frame in given_up} == {STAMP}
    assert {frame.stamp for frame in kept} == {STAMP + 1}
    assert [frame.number for frame in frames] == list(range(len(frames)))


def read_frames(connected: socket.socket, until: int) -> list[FrameHeader]:
    """The frames up to that which brings the last element of the second op."""
    connected.settimeout(DEADLINE)
    headers: list[FrameHeader] = []
    with connected.makefile("rb") as stream:
        while True:
            header = FrameHeader.unpack(stream.read(HEADER_SIZE))
            stream.read(header.length)
            headers.append(header)
            if header.seq == 1 and header.offset + header.length // 4 == until:
                return headers
