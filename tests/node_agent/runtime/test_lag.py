"""The lateness of a loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from allfold_agent.runtime.reactor import TICK_SECONDS, LagMeter
from tests.support.waiting import wait_until


def test_a_loop_that_does_not_come_to_its_timer_is_late_before_and_after_it() -> None:
    due: list[Callable[[], None]] = []
    meter = LagMeter(lambda _seconds, task: due.append(task))
    assert meter.longest() == 0.0
    meter.start()
    began = time.monotonic()
    wait_until(lambda: meter.longest() > 0.05, "the timer is overdue")
    assert time.monotonic() - began > TICK_SECONDS
    due.pop()()
    assert len(due) == 1
    assert meter.longest() > 0.05


def test_a_timer_in_time_is_not_late() -> None:
    due: list[Callable[[], None]] = []
    meter = LagMeter(lambda _seconds, task: due.append(task))
    meter.start()
    due.pop()()
    assert meter.longest() == 0.0
