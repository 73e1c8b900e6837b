"""Tasks that a test has done in the thread of the short lane."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TypeVar

from allfold_agent.runtime.lane_thread import LaneThread

T = TypeVar("T")
SECONDS = 10.0


def in_thread(thread: LaneThread, task: Callable[[], T]) -> T:
    """Do a task there, behind all that it was asked for before; return what the task returns."""
    found: list[T] = []
    errors: list[BaseException] = []
    done = Event()

    def work() -> None:
        try:
            found.append(task())
        except BaseException as error:  # noqa: BLE001 - the test sees it
            errors.append(error)
        done.set()

    thread.call(work)
    assert done.wait(SECONDS), "the thread of the short lane hangs"
    if errors:
        raise errors[0]
    return found[0]
