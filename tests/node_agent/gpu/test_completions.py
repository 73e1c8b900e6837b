"""Whoever waits for a GPU is told once, in the order of its work, of the end or of the error."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Iterator
from queue import Queue
from threading import Event, Thread
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allfold_agent.gpu import completions as completions_module
from allfold_agent.gpu.completions import Completions, FencePoller, Then
from allfold_core.errors import GpuFailed
from tests.support.waiting import wait_until

SECONDS = 10.0

Told = Queue[tuple[int, Exception | None]]


class Point:
    """A point that is reached when a test says so."""

    def __init__(self, *, is_set: bool = False) -> None:
        self.looks = 0
        self.error: Exception | None = None
        self._event = Event()
        if is_set:
            self.reach()

    def reach(self, error: Exception | None = None) -> None:
        self.error = error
        self._event.set()

    def is_reached(self) -> bool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self._event.is_set()


@pytest.fixture
def poller() -> Iterator[FencePoller]:
    poller = FencePoller("test-completions")
    yield poller
    poller.close()


@pytest.fixture
def completions(poller: FencePoller) -> Completions:
    return Completions(poller)


def expect(completions: Completions, points: list[Point], seconds: float = SECONDS) -> Told:
    told: Told = Queue()
    for number, point in enumerate(points):
        completions.add(point, hear(told, number), seconds)
    return told


def hear(told: Told, number: int) -> Then:
    return lambda error: told.put((number, error))


def take(told: Told, count: int) -> list[tuple[int, Exception | None]]:
    return [told.get(timeout=SECONDS) for _ in range(count)]


def test_they_are_told_in_the_order_of_the_work(completions: Completions) -> None:
    points = [Point() for _ in range(5)]
    told = expect(completions, points)
    for point in reversed(points[1:]):
        point.reach()
    wait_until(lambda: points[0].looks > 2, "the first one is looked at")
    assert told.empty(), "one behind the first was told"
    points[0].reach()
    assert take(told, 5) == [(number, None) for number in range(5)]


def test_only_the_first_is_looked_at(completions: Completions) -> None:
    points = [Point() for _ in range(3)]
    told = expect(completions, points)
    wait_until(lambda: points[0].looks > 2, "the first one is looked at")
    assert [point.looks for point in points[1:]] == [0, 0]
    points[0].reach()
    assert take(told, 1) == [(0, None)]
    wait_until(lambda: points[1].looks > 2, "the second one is looked at")
    assert points[2].looks == 0


def test_each_hears_of_the_error_that_looking_at_it_gives(completions: Completions) -> None:
    points = [Point() for _ in range(4)]
    told = expect(completions, points)
    failed = GpuFailed("an illegal address was used")
    for point in (points[1], points[3]):
        point.reach(failed)
    points[2].reach()
    points[0].reach(failed)
    assert take(told, 4) == [(0, failed), (1, failed), (2, None), (3, failed)]


def test_those_behind_one_that_is_late_have_their_own_time(completions: Completions) -> None:
    points = [Point(), Point(), Point()]
    told: Told = Queue()
    for number, seconds in enumerate([0.02, SECONDS, 0.02]):
        completions.add(points[number], hear(told, number), seconds)
    number, error = told.get(timeout=SECONDS)
    assert (number, type(error)) == (0, TimeoutError)
    number, error = told.get(timeout=SECONDS)
    assert (number, type(error)) == (2, TimeoutError)
    points[1].reach()
    assert take(told, 1) == [(1, None)]


def test_a_shorter_time_behind_a_longer_one_is_over_in_time(completions: Completions) -> None:
    told: Told = Queue()
    first = Point()
    completions.add(first, hear(told, 0), SECONDS)
    completions.add(Point(), hear(told, 1), 0.02)
    number, error = told.get(timeout=SECONDS / 2)
    assert (number, type(error)) == (1, TimeoutError)
    first.reach()
    assert take(told, 1) == [(0, None)]


def test_a_gpu_is_stuck_until_it_has_done_what_nobody_waits_for_any_more(
    completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions_module, "_QUIET_SECONDS", 0.05)
    told: Told = Queue()
    late = Point()
    assert not completions.is_stuck
    completions.add(late, hear(told, 0), 0.0)
    take(told, 1)
    assert completions.is_stuck
    late.reach()
    assert completions.is_stuck, "memory of ranks may have been written just now"
    wait_until(lambda: not completions.is_stuck, "the GPU is trusted again")


def test_what_a_stuck_gpu_may_use_is_kept_until_it_is_done(completions: Completions) -> None:
    class Memory:
        """The memory of an op."""

    memory, late = Memory(), Point()
    used, told = ref(memory), Event()

    def then(_error: Exception | None, _memory: Memory = memory) -> None:
        told.set()

    completions.add(late, then, 0.0)
    del memory, then
    assert told.wait(SECONDS)
    gc.collect()
    assert used() is not None
    late.reach()
    wait_until(lambda: used() is None, "the memory is let go of, though nobody has asked")


def test_what_is_reached_in_the_end_has_not_timed_out(completions: Completions) -> None:
    first, late = Point(), Point(is_set=True)
    told: Told = Queue()
    completions.add(first, hear(told, 0), SECONDS)
    completions.add(late, hear(told, 1), 0.0)
    first.reach()
    assert take(told, 2) == [(0, None), (1, None)]


def test_more_may_be_asked_for_by_whoever_is_told(completions: Completions) -> None:
    told: Told = Queue()

    def again(left: int) -> None:
        def then(error: Exception | None) -> None:
            told.put((left, error))
            if left:
                again(left - 1)

        completions.add(Point(is_set=bool(left % 3)), then, 0.005)

    again(20)
    numbers, errors = zip(*take(told, 21), strict=True)
    assert list(numbers) == list(range(20, -1, -1))
    for number, error in zip(numbers, errors, strict=True):
        assert (error is None) is bool(number % 3)


def test_one_that_fails_when_it_is_told_does_not_stop_those_behind(
    completions: Completions, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_error: Exception | None) -> None:
        raise RuntimeError("of then")

    first, told = Point(), Queue[Exception | None]()
    completions.add(first, fail, SECONDS)
    completions.add(Point(is_set=True), fail, SECONDS)
    completions.add(Point(is_set=True), told.put, SECONDS)
    with caplog.at_level(logging.ERROR):
        first.reach()
        assert told.get(timeout=SECONDS) is None
    assert caplog.text.count("RuntimeError: of then") == 2


def test_it_begins_anew_after_it_had_nothing_to_do(completions: Completions) -> None:
    for number in range(200):
        told = expect(completions, [Point(is_set=True)] * (number % 3 + 1))
        assert [error for _, error in take(told, number % 3 + 1)] == [None] * (number % 3 + 1)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from(["reached", "failed", "late"]), max_size=12),
    st.randoms(use_true_random=False),
)
def test_everybody_is_told_the_end_of_its_own_point(fates: list[str], order: random.Random) -> None:
    poller = FencePoller("test-completions")
    try:
        points = [Point() for _ in fates]
        told: Told = Queue()
        completions = Completions(poller)
        for number, (point, fate) in enumerate(zip(points, fates, strict=True)):
            seconds = 0.002 if fate == "late" else SECONDS
            completions.add(point, hear(told, number), seconds)
        ends = [each for each in zip(points, fates, strict=True) if each[1] != "late"]
        order.shuffle(ends)
        for point, fate in ends:
            point.reach(GpuFailed("no") if fate == "failed" else None)
        expected = {"reached": type(None), "failed": GpuFailed, "late": TimeoutError}
        heard = take(told, len(fates))
        assert {number: type(error) for number, error in heard} == {
            number: expected[fate] for number, fate in enumerate(fates)
        }
        in_time = [number for number, error in heard if not isinstance(error, TimeoutError)]
        assert in_time == sorted(in_time)
    finally:
        poller.close()


def test_everybody_is_told_once_when_threads_ask_at_once(completions: Completions) -> None:
    threads, each = 4, 250
    told: Told = Queue()

    def ask(thread: int) -> None:
        dice = random.Random(thread)
        for number in range(thread * each, (thread + 1) * each):
            point = Point(is_set=dice.random() < 0.7)
            completions.add(point, hear(told, number), SECONDS)
            if not point._event.is_set():
                point.reach(GpuFailed("no") if dice.random() < 0.2 else None)

    running = [Thread(target=ask, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    heard = [number for number, _ in take(told, threads * each)]
    for thread in running:
        thread.join(SECONDS)
    assert sorted(heard) == list(range(threads * each))
    for first in range(0, threads * each, each):
        own = [number for number in heard if first <= number < first + each]
        assert own == sorted(own), "one thread's points were told in another order"
    last = expect(completions, [Point(is_set=True)])
    assert take(last, 1) == [(0, None)]
    assert told.empty()


def test_they_are_told_in_the_thread_that_looks(completions: Completions) -> None:
    names: Queue[str] = Queue()
    completions.add(
        Point(is_set=True), lambda _: names.put(threading.current_thread().name), SECONDS
    )
    assert names.get(timeout=SECONDS) == "test-completions"
