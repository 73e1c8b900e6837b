"""Long payloads of the short lane: the memory that they come to, and that they leave."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD, Payload, Payloads
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.protocol.frames import HEADER_SIZE
from tests.node_agent.groups.lane_ends import End, MakePair, frame, joined
from tests.node_agent.in_lane import in_thread
from tests.support.fakes.damaged_wire import tcp_pair
from tests.support.waiting import wait_until

LONG = 300_000
"""Longer than what is copied out of the stage."""


def content(number: int, nbytes: int = LONG) -> bytes:
    """Bytes that differ along the payload, so that shifted ones are seen."""
    return bytes([number, *range(1, 251)]) * (nbytes // 251) + bytes(nbytes % 251)


def begin_to_fill(receiver: End, data: bytes) -> None:
    """Await that a long frame has come up to the end of what was sent of it."""

    def got() -> int:
        reader = receiver.receiving
        return -1 if reader.header is None else reader.header.length - reader.missing

    wait_until(lambda: in_thread(receiver.thread, got) == len(data) - HEADER_SIZE, "it is read")


@pytest.mark.parametrize("early", [0, HEADER_SIZE, HEADER_SIZE + 1000])
def test_a_long_frame_comes_to_where_its_op_wants_it(
    thread: LaneThread, pair: MakePair, early: int
) -> None:
    """Short ones before and behind it do not."""
    near, far = pair()
    receiver = End(thread)
    receiver.there[1] = bytearray(LONG)
    receiver.there[0] = receiver.there[2] = bytearray(5)
    data = frame(b"first") + frame(content(1), 1) + frame(b"third", 2)
    cut = len(frame(b"first")) + early
    receiver.take_in(far, data[:cut])
    near.sendall(data[cut:])
    wait_until(lambda: len(receiver.frames) == 3, "all have come")
    assert receiver.payloads == [b"first", content(1), b"third"]
    assert receiver.came_there == [1]
    assert receiver.there[1] == content(1)
    assert not any(receiver.there[0])


def test_long_frames_of_an_op_that_nobody_waits_for_come_to_memory_that_is_used_again(
    thread: LaneThread, pair: MakePair
) -> None:
    sender, receiver = joined(thread, pair)
    for number in range(5):
        sender.send(content(number))
        wait_until(lambda: len(receiver.frames) == number + 1, "it has come")  # noqa: B023
    assert receiver.payloads == [content(number) for number in range(5)]
    assert receiver.came_there == []


def test_a_damaged_long_frame_ends_the_connection_and_is_not_taken(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    receiver = End(thread)
    receiver.there[0] = bytearray(LONG)
    receiver.take_in(far)
    data = bytearray(frame(content(0)))
    data[-1] ^= 4
    near.sendall(data)
    wait_until(receiver.has_broken, "the connection has ended")
    assert receiver.frames == []


def test_half_a_long_frame_of_an_old_connection_is_not_put_before_those_of_the_new_one(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    receiver = End(thread)
    receiver.take_in(far)
    near.sendall(frame(content(0))[:100_000])
    wait_until(lambda: in_thread(thread, lambda: receiver.receiving.header), "it has begun")
    near, far = pair()
    receiver.take_in(far)
    near.sendall(frame(b"whole", 1) + frame(content(2), 2))
    wait_until(lambda: len(receiver.frames) == 2, "they have come")
    assert receiver.payloads == [b"whole", content(2)]


# Memory that is somebody else's again


def test_what_waits_to_be_sent_comes_as_it_was_when_the_link_was_told_to_let_go(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    memory = [bytearray(content(number)) for number in range(30)]
    sender.send(*memory)
    assert not in_thread(thread, lambda: sender.link.has_sent)
    in_thread(thread, sender.link.let_go)
    for each in memory:
        each[:] = bytes(LONG)
    sender.send(b"the last")
    receiver.take_in(far)
    wait_until(lambda: len(receiver.frames) == 31, "all have come")
    assert receiver.payloads == [*map(content, range(30)), b"the last"]
    assert in_thread(thread, lambda: sender.link.has_sent)


def test_what_is_being_received_comes_to_other_memory_once_the_link_was_told_to_let_go(
    thread: LaneThread, pair: MakePair
) -> None:
    """The frame that is on its way is no use to anybody; the next one is whole."""
    near, far = pair()
    receiver = End(thread)
    receiver.there[0] = bytearray(LONG)
    receiver.take_in(far)
    data = frame(content(0), digest=0)
    near.sendall(data[:100_000])
    begin_to_fill(receiver, data[:100_000])
    in_thread(thread, receiver.link.let_go)
    there = receiver.there.pop(0)
    there[:] = bytes(LONG)
    near.sendall(data[100_000:] + frame(b"the next", 1))
    wait_until(lambda: len(receiver.frames) == 2, "both have come")
    assert not any(there), "it is not written to any more"
    assert receiver.came_there == []
    assert receiver.payloads[1] == b"the next"


def test_a_link_with_nothing_on_its_way_has_nothing_to_let_go(
    thread: LaneThread, pair: MakePair
) -> None:
    sender, receiver = joined(thread, pair)
    for each in (sender, receiver):
        in_thread(thread, each.link.let_go)
    sender.send(content(0))
    wait_until(lambda: len(receiver.frames) == 1, "it has come")
    assert receiver.payloads == [content(0)]


# The memory that is given back


def test_what_was_given_back_last_is_used_next() -> None:
    payloads = Payloads()
    first, second = payloads.take(LONG), payloads.take(10)
    assert len(first) == LONG
    assert first.obj is not second.obj
    payloads.give_back(first)
    payloads.give_back(second)
    assert payloads.take(LONGEST_PAYLOAD).obj is second.obj
    assert payloads.take(LONGEST_PAYLOAD).obj is first.obj


def test_memory_of_others_is_not_kept() -> None:
    payloads = Payloads()
    shorter = bytearray(10)
    theirs: list[Payload] = [shorter, memoryview(shorter), memoryview(bytes(LONGEST_PAYLOAD))]
    for each in theirs:
        payloads.give_back(each)
    assert all(payloads.take(5).obj is not shorter for _ in range(3))
    assert len(payloads.take(LONGEST_PAYLOAD)) == LONGEST_PAYLOAD


def test_of_much_memory_that_is_given_back_only_some_is_kept() -> None:
    payloads = Payloads()
    taken = [payloads.take(1) for _ in range(40)]
    for each in taken:
        payloads.give_back(each)
    assert len(payloads._idle) == 32


@pytest.mark.parametrize("make", [tcp_pair, socket.socketpair], ids=["tcp", "unix"])
def test_what_comes_over_a_network_is_measured(
    thread: LaneThread, make: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    near, far = make()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    receiver.take_in(far)
    count = 3 * (4 << 20) // LONG + 20
    for number in range(count):
        sender.send(content(number % 200))
    wait_until(lambda: len(receiver.frames) == count, "all have come")
    rate = receiver.link.rate
    is_network = near.family == socket.AF_INET
    assert (rate.samples > 0) is is_network
    in_thread(thread, sender.link.close)
    in_thread(thread, receiver.link.close)
