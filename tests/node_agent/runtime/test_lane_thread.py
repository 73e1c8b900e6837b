"""The thread of the short lane: serves what there is, blocks when nothing happens, and goes on."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from threading import Event, get_ident

import pytest

from allfold_agent.runtime import lane_thread
from allfold_agent.runtime.lane_thread import READABLE, WRITABLE, LaneThread
from tests.node_agent.in_lane import SECONDS, in_thread
from tests.support.waiting import wait_until


@pytest.fixture
def thread() -> Iterator[LaneThread]:
    thread = LaneThread("test")
    yield thread
    thread.close()


class OneLane:
    """A lane with so much to do, one thing at a time.

    Attributes:
        left: the things to do.
        said: what the ranks were told last; ``None`` for nothing yet.
        rests: how often it was told to let go of memory.
    """

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.done = 0
        self.said: bool | None = None
        self.served_in: set[int] = set()
        self.on_blocking: Callable[[], None] = lambda: None
        self.rests = 0

    def rest(self) -> None:
        self.rests += 1

    def advance(self) -> bool:
        self.served_in.add(get_ident())
        if not self.left:
            return False
        self.left -= 1
        self.done += 1
        return True

    def announce(self, blocks: bool) -> None:
        self.said = blocks
        if blocks:
            self.on_blocking()


class FailingLane(OneLane):
    def advance(self) -> bool:
        super().advance()
        raise RuntimeError("not my day")


def serve(thread: LaneThread, lane: OneLane) -> None:
    in_thread(thread, lambda: thread.add(lane))


def wake(thread: LaneThread) -> None:
    """As a rank does it, which has posted something."""
    os.eventfd_write(thread.wake_descriptor, 1)


def blocks(lane: OneLane) -> None:
    """Wait until the ranks have been told that they have to wake the thread."""
    wait_until(lambda: lane.said, "the thread blocks", SECONDS)


def test_the_thread_begins_with_its_first_task_and_does_all_of_them_in_order(
    thread: LaneThread,
) -> None:
    order: list[int] = []
    for number in range(100):
        thread.call(lambda number=number: order.append(number))  # type: ignore[misc]
    assert in_thread(thread, get_ident) != get_ident()
    assert order == list(range(100))


def test_a_lane_is_served_until_it_has_nothing_left_and_by_one_thread(thread: LaneThread) -> None:
    lane = OneLane(1000)
    serve(thread, lane)
    wait_until(lambda: lane.done == 1000, "all is done", SECONDS)
    assert lane.served_in == {in_thread(thread, get_ident)}


def test_a_lane_is_served_once_though_it_was_added_twice_and_no_more_once_removed(
    thread: LaneThread,
) -> None:
    lane = OneLane()
    for _ in range(2):
        serve(thread, lane)
    in_thread(thread, lambda: thread.remove(lane))
    in_thread(thread, lambda: thread.remove(lane))
    lane.left = 1
    wake(thread)
    in_thread(thread, get_ident)
    assert not lane.done


def test_one_for_which_nothing_happens_for_long_is_told_to_rest(
    thread: LaneThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold_agent.runtime.lane_thread._LONGEST_BLOCK_SECONDS", 0.01)
    lane = OneLane()
    serve(thread, lane)
    wait_until(lambda: lane.rests > 0, "it rests", SECONDS)


def test_one_that_blocks_has_told_the_ranks_so_and_is_woken_by_a_rank(thread: LaneThread) -> None:
    lane = OneLane()
    serve(thread, lane)
    for _ in range(20):
        blocks(lane)
        lane.said = None
        lane.left += 1
        wake(thread)
        wait_until(lambda: not lane.left, "it is done", SECONDS)
    assert lane.done == 20


def test_what_is_posted_while_the_ranks_are_told_is_done_though_nobody_wakes_the_thread(
    thread: LaneThread,
) -> None:
    """A rank that posts just then has not seen that the thread has to be woken."""
    lane = OneLane()

    def post() -> None:
        lane.on_blocking = lambda: None
        lane.left += 1

    lane.on_blocking = post
    serve(thread, lane)
    wait_until(lambda: lane.done == 1, "it is done", 2.0)  # by itself it would look much later


def test_it_goes_on_looking_for_a_moment_before_it_blocks(
    thread: LaneThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0.0, 10e-6)  # each look takes so long, whatever else runs here
    monkeypatch.setattr(lane_thread, "monotonic", lambda: next(seconds))
    looked: list[int] = []

    class Counting(OneLane):
        def advance(self) -> bool:
            looked.append(0)
            return super().advance()

        def announce(self, blocks: bool) -> None:
            looked.append(int(blocks))

    serve(thread, Counting(1))
    wait_until(lambda: 1 in looked, "it blocks", SECONDS)
    assert looked.index(1) > 2


def test_it_uses_no_processor_while_nothing_happens(thread: LaneThread) -> None:
    lane = OneLane()
    serve(thread, lane)
    blocks(lane)
    before = in_thread(thread, time.thread_time)
    time.sleep(1.0)  # what is measured is the time in which nothing happens
    after = in_thread(thread, time.thread_time)
    assert after - before < 0.1


def test_a_connection_is_served_for_the_events_that_were_asked_for(thread: LaneThread) -> None:
    ours, theirs = socket.socketpair()
    got: list[bytes] = []
    writable = Event()

    def take(events: int) -> None:
        if events & READABLE:
            got.append(theirs.recv(100))
        if events & WRITABLE:
            writable.set()
            thread.modify(theirs.fileno(), READABLE)

    with ours, theirs:
        in_thread(thread, lambda: thread.register(theirs.fileno(), take))
        ours.send(b"hello")
        wait_until(lambda: got == [b"hello"], "it is read", SECONDS)
        assert not writable.is_set()
        in_thread(thread, lambda: thread.modify(theirs.fileno(), READABLE | WRITABLE))
        assert writable.wait(SECONDS)
        in_thread(thread, lambda: thread.unregister(theirs.fileno()))
        ours.send(b"more")
        in_thread(thread, get_ident)
        assert got == [b"hello"]


def test_one_that_is_forgotten_while_both_are_ready_is_not_served(thread: LaneThread) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    served: list[int] = []

    def serve_only_one(number: int) -> None:
        served.append(number)
        thread.unregister(pairs[1 - number][1].fileno())
        pairs[number][1].recv(100)

    def make_both_ready() -> None:
        for number, (ours, theirs) in enumerate(pairs):
            thread.register(
                theirs.fileno(),
                lambda _, number=number: serve_only_one(number),  # type: ignore[misc]
            )
            ours.send(b"!")

    in_thread(thread, make_both_ready)
    wait_until(lambda: served, "one is served", SECONDS)
    in_thread(thread, get_ident)
    assert len(served) == 1
    for ours, theirs in pairs:
        ours.close()
        theirs.close()


def test_a_failing_lane_a_failing_task_and_a_failing_connection_end_nothing(
    thread: LaneThread, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()

    def fail(_: int = 0) -> None:
        thread.unregister(theirs.fileno())
        raise RuntimeError("nor mine")

    def fail_as_task() -> None:
        raise RuntimeError("nor that of the task")

    with ours, theirs:
        failing, good = FailingLane(), OneLane(10)
        serve(thread, failing)
        serve(thread, good)
        in_thread(thread, lambda: thread.register(theirs.fileno(), fail))
        ours.send(b"!")
        thread.call(fail_as_task)
        wait_until(lambda: good.done == 10, "the other lane is served", SECONDS)
        blocks(good)
        wait_until(lambda: "nor mine" in caplog.text, "the connection has failed", SECONDS)
        in_thread(thread, get_ident)
    assert "not my day" in caplog.text
    assert "nor that of the task" in caplog.text


def test_a_closed_thread_has_ended_and_takes_no_task() -> None:
    thread = LaneThread("test")
    lane = OneLane()
    serve(thread, lane)
    blocks(lane)
    thread.close()
    done = Event()
    thread.call(done.set)
    lane.left = 1
    assert thread._thread is not None
    assert not thread._thread.is_alive()
    assert not done.is_set()
    assert not lane.done


def test_one_that_was_never_started_can_be_closed() -> None:
    LaneThread("test").close()
