"""Conditions that nobody can be told of are looked at until they hold, fail or take too long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from threading import Event, Thread
from time import monotonic

import pytest

from allfold_agent.gpu.completions import FencePoller, Then
from tests.support.waiting import wait_until

SECONDS = 10.0
NAME = "test-watch"

Ends = Queue[Exception | None]
Told = Queue[tuple[int, Exception | None]]


@pytest.fixture
def poller() -> Iterator[FencePoller]:
    poller = FencePoller(NAME)
    yield poller
    poller.close()


def watchers() -> list[Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def end_of(
    poller: FencePoller, condition: Callable[[], bool], seconds: float = SECONDS
) -> Exception | None:
    """With what ``then`` is called."""
    ends: Ends = Queue()
    poller.when(condition, ends.put, seconds)
    return ends.get(timeout=SECONDS)


def hear(told: Told, number: int) -> Then:
    return lambda error: told.put((number, error))


def always() -> bool:
    return True


def never() -> bool:
    return False


def broken() -> bool:
    raise KeyError("broken")


def test_it_is_told_when_a_condition_holds(poller: FencePoller) -> None:
    event, ends = Event(), Ends()
    poller.when(event.is_set, ends.put, SECONDS)
    assert end_of(poller, always) is None
    assert ends.empty()
    event.set()
    assert ends.get(timeout=SECONDS) is None


def test_the_error_of_a_condition_is_handed_on(poller: FencePoller) -> None:
    assert isinstance(end_of(poller, broken), KeyError)


def test_what_takes_too_long_ends_with_a_timeout(poller: FencePoller) -> None:
    started = monotonic()
    assert isinstance(end_of(poller, never, 0.02), TimeoutError)
    assert monotonic() - started >= 0.02


def test_what_holds_has_not_timed_out(poller: FencePoller) -> None:
    assert end_of(poller, always, 0.0) is None


def test_each_is_told_its_own_end_once(poller: FencePoller) -> None:
    events = [Event() for _ in range(20)]
    told: Told = Queue()
    for number, event in enumerate(events):
        poller.when(event.is_set, hear(told, number), SECONDS)
    poller.when(broken, hear(told, 20), SECONDS)
    poller.when(never, hear(told, 21), 0.01)
    for event in reversed(events):
        event.set()
    ends = dict(told.get(timeout=SECONDS) for _ in range(22))
    assert [ends[number] for number in range(20)] == [None] * 20
    assert isinstance(ends[20], KeyError)
    assert isinstance(ends[21], TimeoutError)
    assert end_of(poller, always) is None
    assert told.empty()


def test_one_that_fails_does_not_stop_the_others(
    poller: FencePoller, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_error: Exception | None) -> None:
        raise RuntimeError("of then")

    with caplog.at_level(logging.ERROR):
        poller.when(always, fail, SECONDS)
        assert end_of(poller, always) is None
    assert "of then" in caplog.text


def test_then_may_ask_for_more(poller: FencePoller) -> None:
    left, ends = iter(range(50)), Ends()

    def again(error: Exception | None) -> None:
        if error is None and next(left, None) is not None:
            poller.when(always, again, SECONDS)
        else:
            ends.put(error)

    poller.when(always, again, SECONDS)
    assert ends.get(timeout=SECONDS) is None


def test_threads_may_ask_at_once(poller: FencePoller) -> None:
    ends = Ends()

    def ask() -> None:
        for _ in range(100):
            poller.when(always, ends.put, SECONDS)

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [ends.get(timeout=SECONDS) for _ in range(400)] == [None] * 400
    assert end_of(poller, always) is None
    assert ends.empty()


def test_the_thread_starts_when_it_is_needed_and_ends_with_it() -> None:
    poller = FencePoller(NAME)
    assert not watchers()
    for _ in range(2):
        assert end_of(poller, always) is None
        assert len(watchers()) == 1
    poller.close()
    assert not watchers()


def test_close_forgets_what_has_not_happened() -> None:
    poller, ends = FencePoller(NAME), Ends()
    poller.when(never, ends.put, SECONDS)
    poller.close()
    assert ends.empty()
    assert not watchers()
    with pytest.raises(RuntimeError):
        poller.when(always, ends.put, SECONDS)


def test_one_that_was_never_used_can_be_closed() -> None:
    poller = FencePoller(NAME)
    poller.close()
    with pytest.raises(RuntimeError):
        poller.when(always, Ends().put, SECONDS)


def test_to_ask_for_more_at_the_end_is_an_error_that_does_not_delay_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poller, asking, closing = FencePoller(NAME), Event(), Event()

    def ask(_error: Exception | None) -> None:
        asking.set()
        assert closing.wait(SECONDS)
        poller.when(always, ask, SECONDS)

    poller.when(always, ask, SECONDS)
    assert asking.wait(SECONDS)
    closer = Thread(target=poller.close)
    with caplog.at_level(logging.ERROR):
        closer.start()
        wait_until(lambda: poller._closed, "the poller is being closed")
        closing.set()
        closer.join(SECONDS)
    assert not watchers()
    assert "nobody looks any more" in caplog.text


def test_it_looks_seldom_at_what_takes_long(poller: FencePoller) -> None:
    """Each pause is at least 50 µs, but for the first 0.2 ms, in which a machine looks often."""
    looks: list[float] = []

    def look() -> bool:
        looks.append(monotonic())
        return False

    assert isinstance(end_of(poller, look, 0.3), TimeoutError)
    late = [when for when in looks if when - looks[0] > 0.03]
    assert 1 <= len(late) <= 300, "it looks more often than each millisecond"
    assert len(looks) < 5000


def test_something_new_is_looked_at_soon_although_something_old_takes_long(
    poller: FencePoller,
) -> None:
    poller.when(never, lambda _: None, SECONDS)
    for _ in range(5):
        assert end_of(poller, always, 0.0) is None
