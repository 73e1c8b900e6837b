"""Payloads of the short lane that a node on the same machine reads where they lie."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref

import pytest

from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD
from allfold_agent.runtime.buffers import BufferPool, SharedFile
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.protocol.frames import (
    ACK,
    HEADER_SIZE,
    RANGE_SIZE,
    FrameHeader,
    FrameType,
    SharedRange,
)
from tests.node_agent.groups.lane_ends import End, MakePair, frame, joined
from tests.node_agent.in_lane import in_thread
from tests.support.waiting import wait_until

LONG = 100_000
SHORT = 10_000
"""So short that it is sent itself."""


def content(number: int, nbytes: int = LONG) -> bytes:
    return bytes([number, *range(1, 251)]) * (nbytes // 251) + bytes(nbytes % 251)


def file_of(data: bytes) -> SharedFile:
    """Return a file in memory that cannot be cut."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return SharedFile(descriptor)


def joined_with_files(thread: LaneThread, pair: MakePair) -> tuple[End, End]:
    """A sender that knows that the other end takes files, and that one."""
    sender, receiver = joined(thread, pair)
    wait_until(lambda: in_thread(thread, lambda: sender.sending.takes_files), "it takes files")
    return sender, receiver


def range_frame(number: int, found: SharedRange) -> bytes:
    return frame(found.pack(), number, 0, FrameType.SHARED)


def test_a_payload_is_read_out_of_the_file_that_it_is_in(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    sender, receiver = joined_with_files(thread, unix_pair)
    files = [file_of(bytes(64) + content(number)) for number in range(3)]
    for seq, number in enumerate([0, 1, 0, 2, 1]):
        # Other bytes than in the file: whoever gets those has read the file.
        sender.send_from((files[number], 64), bytes(LONG), seq)
    wait_until(lambda: len(receiver.frames) == 5, "all have come")
    assert receiver.payloads == [content(number) for number in [0, 1, 0, 2, 1]]
    for _, header, payload in receiver.frames:
        assert header.type is FrameType.DATA
        assert header.length == len(payload) == LONG
    for counted in (sender.link.sent, receiver.link.received):
        assert (counted.frames, counted.payload_bytes) == (5, 5 * LONG)


def test_more_files_than_have_a_number_take_those_of_the_first_ones(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    sender, receiver = joined_with_files(thread, unix_pair)
    files = [file_of(content(number)) for number in range(12)]
    order = [*range(12), 0, 11, 5, 3]
    for seq, number in enumerate(order):
        sender.send_from((files[number], 0), bytes(LONG), seq)
    wait_until(lambda: len(receiver.frames) == len(order), "all have come")
    assert receiver.payloads == [content(number) for number in order]


def test_files_follow_their_frames_through_a_full_socket(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    near, far = unix_pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    far.send(ACK.pack(0))
    wait_until(lambda: in_thread(thread, lambda: sender.sending.takes_files), "it takes files")
    files = [file_of(content(number)) for number in range(6)]
    sender.send(*[bytes(LONGEST_PAYLOAD)] * 4)
    assert not in_thread(thread, lambda: sender.link.has_sent)
    for number, file in enumerate(files):
        sender.send_from((file, 0), bytes(LONG), 2 * number)
        sender.send(b"between")
    receiver.take_in(far)
    wait_until(lambda: len(receiver.frames) == 4 + 12, "all have come")
    assert receiver.payloads[4::2] == [content(number) for number in range(6)]
    assert set(receiver.payloads[5::2]) == {b"between"}
    assert not receiver.broken


def test_a_file_passes_once_though_what_waits_is_let_go(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    near, far = unix_pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    far.send(ACK.pack(0))
    wait_until(lambda: in_thread(thread, lambda: sender.sending.takes_files), "it takes files")
    file = file_of(content(1))
    sender.send(*[bytes(LONGEST_PAYLOAD)] * 4)
    for seq in range(3):
        sender.send_from((file, 0), bytes(LONG), seq)
    in_thread(thread, sender.link.let_go)
    receiver.take_in(far)
    wait_until(lambda: len(receiver.frames) == 4 + 3, "all have come")
    assert receiver.payloads[4:] == [content(1)] * 3


def test_a_file_that_waits_to_be_passed_stays_open_though_nobody_else_has_it(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    """Its number would be another file's by then."""
    near, far = unix_pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    far.send(ACK.pack(0))
    wait_until(lambda: in_thread(thread, lambda: sender.sending.takes_files), "it takes files")
    sender.send(*[bytes(LONGEST_PAYLOAD)] * 4)
    file = file_of(content(1))
    sender.send_from((file, 0), bytes(LONG))
    is_open = weakref.ref(file)
    del file
    _others = [file_of(content(number)) for number in range(2, 5)]
    receiver.take_in(far)
    wait_until(lambda: len(receiver.frames) == 4 + 1, "all have come")
    assert receiver.payloads[4] == content(1)
    wait_until(lambda: is_open() is None, "it is closed once it has been passed")


def test_what_is_short_is_sent_itself(thread: LaneThread, unix_pair: MakePair) -> None:
    sender, receiver = joined_with_files(thread, unix_pair)
    sender.send_from((file_of(content(1)), 0), content(2, SHORT))
    wait_until(lambda: len(receiver.frames) == 1, "it has come")
    assert receiver.payloads == [content(2, SHORT)]


def test_what_is_in_no_file_is_sent_itself(thread: LaneThread, unix_pair: MakePair) -> None:
    """As small work buffers are, and what a process has that is out of descriptors."""
    sender, receiver = joined_with_files(thread, unix_pair)
    buffer = BufferPool(1 << 30, lambda *_: None).take(LONG, shared=True)
    assert buffer.file is None
    sender.send_from((buffer, 0), content(1))
    sender.send_from((SharedFile(None), 0), content(2), 1)
    sender.send_from((file_of(content(3)), 0), bytes(LONG), 2)
    wait_until(lambda: len(receiver.frames) == 3 or receiver.broken, "all have come")
    assert receiver.payloads == [content(1), content(2), content(3)]
    assert not receiver.broken


def test_nothing_is_read_out_of_files_before_the_other_end_says_that_it_takes_them(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    near, far = unix_pair()
    sender = End(thread)
    sender.take_out(near)
    sender.send_from((file_of(bytes(LONG)), 0), content(1))
    header = FrameHeader.unpack(far.recv(HEADER_SIZE))
    assert (header.type, header.length) == (FrameType.DATA, LONG)


def test_over_a_wire_no_files_are_passed(thread: LaneThread, wire: MakePair) -> None:
    """Not even if the other end says that it takes them."""
    near, far = wire()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    receiver.take_in(far)
    far.send(ACK.pack(0))
    sender.send(b"first")
    wait_until(lambda: len(receiver.frames) == 1, "it has come")
    sender.send_from((file_of(bytes(LONG)), 0), content(1), 1)
    wait_until(lambda: len(receiver.frames) == 2, "it has come")
    assert receiver.payloads[1] == content(1)
    assert not in_thread(thread, lambda: sender.sending.takes_files)


# What goes wrong


def asks_for_files(receiver: End, near: socket.socket) -> bool:
    """Return True if a receiver that has just got a connection takes files on it."""
    in_thread(receiver.thread, lambda: None)
    near.setblocking(False)
    try:
        return near.recv(10) == ACK.pack(0)
    except BlockingIOError:
        return False


def test_a_frame_whose_file_is_missing_ends_the_connection_and_the_next_one_takes_none(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    """Something between the two nodes passes bytes alone."""
    near, far = unix_pair()
    receiver = End(thread)
    receiver.take_in(far)
    assert asks_for_files(receiver, near)
    near.sendall(range_frame(0, SharedRange(0, True, 0, LONG)))
    wait_until(receiver.has_broken, "the connection has ended")
    assert receiver.frames == []
    near, far = unix_pair()
    receiver.take_in(far)
    assert not asks_for_files(receiver, near)
    near.sendall(frame(content(1)))
    wait_until(lambda: len(receiver.frames) == 1, "it has come")


@pytest.mark.parametrize(
    "wrong",
    [
        range_frame(0, SharedRange(0, False, 0, LONG)),
        range_frame(0, SharedRange(8, True, 0, LONG)),
        range_frame(0, SharedRange(0, True, 1, LONG)),
        frame(bytes(RANGE_SIZE + 1), 0, 0, FrameType.SHARED),
    ],
    ids=["a file that has not come", "a number that is too high", "beyond the file", "no range"],
)
def test_a_range_that_is_in_no_file_that_has_come_ends_the_connection(
    thread: LaneThread, unix_pair: MakePair, wrong: bytes
) -> None:
    """The next connection takes files all the same."""
    near, far = unix_pair()
    receiver = End(thread)
    receiver.take_in(far)
    file = file_of(content(1))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.file))]
    near.sendmsg([wrong], rights)
    wait_until(receiver.has_broken, "the connection has ended")
    assert receiver.frames == []
    near, far = unix_pair()
    receiver.take_in(far)
    assert asks_for_files(receiver, near)


def test_a_new_connection_has_files_of_its_own(thread: LaneThread, unix_pair: MakePair) -> None:
    sender, receiver = joined_with_files(thread, unix_pair)
    file = file_of(content(1))
    sender.send_from((file, 0), bytes(LONG))
    wait_until(lambda: len(receiver.frames) == 1, "it has come")
    near, far = unix_pair()

    def replace() -> None:
        sender.link.take_out(near)
        receiver.link.take_in(far, b"")

    in_thread(thread, replace)
    wait_until(lambda: in_thread(thread, lambda: sender.sending.takes_files), "it takes files")
    sender.send_from((file, 0), bytes(LONG), 1)
    wait_until(lambda: len(receiver.frames) == 2, "it has come")
    assert receiver.payloads == [content(1)] * 2


def test_a_new_connection_whose_other_end_takes_no_files_is_sent_none(
    thread: LaneThread, unix_pair: MakePair
) -> None:
    sender, _ = joined_with_files(thread, unix_pair)
    near, far = unix_pair()
    sender.take_out(near)
    sender.send_from((file_of(bytes(LONG)), 0), content(1))
    assert FrameHeader.unpack(far.recv(HEADER_SIZE)).type is FrameType.DATA
