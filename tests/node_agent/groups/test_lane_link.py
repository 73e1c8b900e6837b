"""The connections of the short lane: whole frames in order, and an end where one is damaged."""

from __future__ import annotations

import socket

import pytest
import xxhash

from allfold_agent.groups.lane.link import LaneDoor
from allfold_agent.groups.lane.payloads import LONGEST_PAYLOAD, Payload
from allfold_agent.runtime.lane_thread import LaneThread
from allfold_core.errors import PeerLost
from allfold_core.protocol.frames import HEADER_SIZE, FrameHeader, FrameType
from tests.node_agent.groups.lane_ends import FINGERPRINT, STAMP, End, MakePair, frame, joined
from tests.node_agent.in_lane import in_thread
from tests.support.waiting import wait_until


def test_frames_come_whole_and_in_order_with_all_that_their_headers_say(
    thread: LaneThread, pair: MakePair
) -> None:
    sender, receiver = joined(thread, pair)
    payloads = [bytes([number]) * (number * 37 % 500) for number in range(200)]
    sender.send(*payloads)
    wait_until(lambda: len(receiver.frames) == 200, "all have come")
    assert receiver.payloads == payloads
    for seq, (node, header, payload) in enumerate(receiver.frames):
        assert node == "there"
        size = len(payload)
        assert header[:7] == (FrameType.DATA, STAMP, seq, seq, 10 * seq, size, FINGERPRINT)
        assert header.behind == seq % 3


def test_a_digest_goes_with_what_leaves_the_machine_alone(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    sender = End(thread)
    sender.take_out(near)
    sender.send(b"payload")
    header = FrameHeader.unpack(far.recv(HEADER_SIZE))
    right = xxhash.xxh3_64_intdigest(b"payload")
    assert header.digest == (right if near.family == socket.AF_INET else 0)


def test_what_a_full_socket_does_not_take_follows_when_it_is_read(
    thread: LaneThread, pair: MakePair
) -> None:
    """And nothing that is sent later comes before it."""
    near, far = pair()
    sender, receiver = End(thread), End(thread)
    sender.take_out(near)
    payloads = [bytes([number]) * 300_000 for number in range(40)]
    sender.send(*payloads)
    sender.send(b"the last")
    assert not in_thread(thread, lambda: sender.link.has_sent)
    receiver.take_in(far)
    wait_until(lambda: len(receiver.frames) == 41, "all have come")
    assert receiver.payloads == [*payloads, b"the last"]
    assert in_thread(thread, lambda: sender.link.has_sent)
    sender.send(b"once more")
    wait_until(lambda: len(receiver.frames) == 42, "the one behind them has come")
    assert not sender.broken
    assert not receiver.broken


def test_payloads_of_later_frames_leave_those_of_earlier_ones_as_they_are(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    sender, keeper = End(thread), Keeper(thread)
    sender.take_out(near)
    keeper.take_in(far)
    payloads = [bytes([number]) * (1000 + number % 2 * 100_000) for number in range(50)]
    sender.send(*payloads)
    wait_until(lambda: len(keeper.kept) == 50, "all have come")
    assert [bytes(each) for each in keeper.kept] == payloads


class Keeper(End):
    """Keeps the payloads themselves, not what was in them as they came."""

    def __init__(self, thread: LaneThread) -> None:
        super().__init__(thread)
        self.kept: list[Payload] = []

    def take(self, node: str, header: FrameHeader, payload: Payload, *, is_there: bool) -> None:
        self.kept.append(payload)


@pytest.mark.parametrize("cut", [1, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 3])
def test_a_frame_that_comes_in_pieces_is_taken_once_it_is_whole(
    thread: LaneThread, pair: MakePair, cut: int
) -> None:
    near, far = pair()
    receiver = End(thread)
    receiver.take_in(far)
    data = frame(b"first") + frame(b"second", 1)
    near.sendall(data[:cut])
    wait_until(lambda: in_thread(thread, lambda: receiver.receiving._filled) == cut, "it is read")
    assert not receiver.frames
    near.sendall(data[cut:])
    wait_until(lambda: len(receiver.frames) == 2, "both have come")
    assert receiver.payloads == [b"first", b"second"]


def test_bytes_that_came_with_the_answer_to_the_dial_are_the_first(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    receiver = End(thread)
    data = frame(b"first") + frame(b"second", 1) + frame(b"third", 2)
    early = HEADER_SIZE + 5 + HEADER_SIZE + 2
    receiver.take_in(far, data[:early])
    assert receiver.payloads == [b"first"]
    near.sendall(data[early:])
    wait_until(lambda: len(receiver.frames) == 3, "all have come")
    assert receiver.payloads == [b"first", b"second", b"third"]


@pytest.mark.parametrize("early", [False, True], ids=["later", "with the answer"])
@pytest.mark.parametrize("place", [20, HEADER_SIZE + 2], ids=["header", "payload"])
def test_a_damaged_frame_ends_the_connection_and_is_not_taken(
    thread: LaneThread, pair: MakePair, place: int, early: bool
) -> None:
    near, far = pair()
    receiver = End(thread)
    data = bytearray(frame(b"good") + frame(b"damaged", 1))
    data[HEADER_SIZE + 4 + place] ^= 4
    if early:
        receiver.take_in(far, bytes(data))
    else:
        receiver.take_in(far)
        near.sendall(data)
    wait_until(receiver.has_broken, "the connection has ended")
    assert receiver.payloads == [b"good"]
    assert receiver.broken == 1
    assert [near.recv(16) for _ in range(2)][-1] == b"", (
        "at most behind the word that it takes files"
    )
    assert far.fileno() == -1


def test_a_frame_that_is_longer_than_any_of_the_short_lane_ends_the_connection(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    receiver = End(thread)
    receiver.take_in(far)
    near.sendall(frame(bytes(LONGEST_PAYLOAD)))
    wait_until(lambda: len(receiver.frames) == 1, "the longest one has come")
    near.sendall(frame(bytes(LONGEST_PAYLOAD + 1), 1)[:HEADER_SIZE])
    wait_until(receiver.has_broken, "the connection has ended")
    assert len(receiver.frames) == 1


def test_both_ends_are_told_when_the_other_one_closes(thread: LaneThread, pair: MakePair) -> None:
    sender, receiver = joined(thread, pair)
    in_thread(thread, receiver.link.close)
    wait_until(sender.has_broken, "the sender knows")
    assert not receiver.has_broken()  # it has closed the connection itself
    sender, receiver = joined(thread, pair)
    in_thread(thread, sender.link.close)
    wait_until(receiver.has_broken, "the receiver knows")
    assert (sender.broken, receiver.broken) == (0, 1)


def test_the_log_has_a_break(
    thread: LaneThread, pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "allfold_agent.groups.lane")
    near, far = pair()
    sender = End(thread)
    sender.take_out(near)
    far.close()
    wait_until(sender.has_broken, "the sender knows")
    (broke,) = caplog.messages
    assert broke.startswith("the short lane to node there broke: ")


def test_what_is_sent_on_a_connection_that_has_ended_is_lost_and_nothing_is_raised(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    sender = End(thread)
    sender.take_out(near)
    far.close()
    sender.send(*[bytes(1000)] * 10)
    wait_until(sender.has_broken, "the sender knows")
    sender.send(b"lost")
    assert sender.broken == 1
    assert in_thread(thread, lambda: sender.link.has_sent)


def test_a_new_connection_takes_the_place_of_the_old_one_and_numbers_its_frames_anew(
    thread: LaneThread, pair: MakePair
) -> None:
    sender, receiver = joined(thread, pair)
    sender.send(b"a", b"b")
    wait_until(lambda: len(receiver.frames) == 2, "both have come")
    near, far = pair()

    def replace() -> None:
        sender.link.take_out(near)
        receiver.link.take_in(far, b"")

    in_thread(thread, replace)
    sender.send(b"c")
    wait_until(lambda: len(receiver.frames) == 3, "the third has come")
    assert [header.number for _, header, _ in receiver.frames] == [0, 1, 0]
    assert not sender.has_broken()
    assert not receiver.has_broken()


def test_half_a_frame_of_an_old_connection_is_not_put_before_those_of_the_new_one(
    thread: LaneThread, pair: MakePair
) -> None:
    near, far = pair()
    receiver = End(thread)
    receiver.take_in(far, frame(b"never whole")[:-3])
    near, far = pair()
    receiver.take_in(far)
    near.sendall(frame(b"whole"))
    wait_until(lambda: len(receiver.frames) == 1, "it has come")
    assert receiver.payloads == [b"whole"]


def test_a_link_is_whole_while_it_has_a_connection_for_each_direction(
    thread: LaneThread, pair: MakePair
) -> None:
    end = End(thread)
    assert not end.link.is_whole
    end.take_out(pair()[0])
    assert not end.link.is_whole
    peer, ours = pair()
    end.take_in(ours)
    assert end.link.is_whole
    peer.close()
    wait_until(end.has_broken, "one has ended")
    assert not end.link.is_whole


def test_frames_and_payload_bytes_are_counted_at_both_ends(
    thread: LaneThread, pair: MakePair
) -> None:
    sender, receiver = joined(thread, pair)
    sender.send(b"", b"abc", bytes(1000))
    wait_until(lambda: len(receiver.frames) == 3, "all have come")
    for counted in (sender.link.sent, receiver.link.received):
        assert (counted.frames, counted.payload_bytes) == (3, 1003)
    for counted in (sender.link.received, receiver.link.sent):
        assert (counted.frames, counted.payload_bytes) == (0, 0)


def test_a_door_leads_to_the_first_frame_alone() -> None:
    taken: list[socket.socket] = []
    door = LaneDoor(taken.append)
    with pytest.raises(PeerLost):
        door.attach(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        door.attach(0)(ours)
        assert taken == [ours]
