"""The end of a program that is told to end: in order, not at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


def end_in_order() -> None:
    """Have SIGTERM and SIGHUP raise ``SystemExit``: every ``with`` ends what it has started.

    Under nohup, SIGHUP stays ignored.
    """
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def completed_first() -> Iterator[None]:
    """Hold those ``SystemExit`` back until the body is done.

    For bodies that are short and must not end halfway. ``subprocess.run`` is one: an exception
    while its child starts leaves the child running, and nobody knows what it does after that.
    """
    # Handlers run in the main thread only; other threads cannot be interrupted.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    held = [number for number in _NUMBERS if signal.getsignal(number) is _end]
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, _end)
        if came:
            signal.raise_signal(came[0])


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
