"""Signals that tell this process to end: it ends in order, not at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class Interrupts:
    """While entered, SIGINT, SIGTERM and SIGHUP are noted instead of ending the process.

    It has a ``fileno``: readable while a signal is unread, so that a wait can include it. Nothing
    is raised in the middle of other work.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._before: dict[int, Any] = {}
        self._reader, self._writer = -1, -1

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = {number: signal.signal(number, self._note) for number in self._NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        return self._reader

    def take(self) -> int | None:
        """The oldest signal that nobody has taken, or None."""
        with suppress(BlockingIOError):
            os.read(self._reader, 4096)
        number = self._noted.pop(0) if self._noted else None
        if self._noted:
            self._wake()
        return number

    def raise_if_pending(self) -> None:
        """Raise :class:`Interrupted` when a signal came."""
        number = self.take()
        if number is not None:
            raise Interrupted(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._noted.append(number)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._writer, b"!")


def end_in_order() -> None:
    """Raise ``SystemExit`` at SIGTERM and SIGHUP: every ``with`` ends what it has started.

    Under nohup, SIGHUP stays ignored.
    """
    for number in _ENDS:
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
    held = [number for number in _ENDS if signal.getsignal(number) is _end]
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
