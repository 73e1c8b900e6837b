"""Keys of a terminal while something is shown on it."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

_QUIT = {b"q", b"Q", b"\x1b", b"\x04"}


class Keys:
    """The keys of the standard input; none where that is no terminal."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def wait_for_quit(self, seconds: float) -> bool:
        """Wait so long; return True at once if a key says that we should end."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            watched = [] if self._fd is None else [self._fd]
            ready, _, _ = select.select(watched, [], [], left)
            if not ready:
                break
            assert self._fd is not None
            pressed = os.read(self._fd, 1)
            if not pressed:  # the terminal is gone
                return True
            if pressed in _QUIT:
                return True
        return False


@contextmanager
def keys() -> Iterator[Keys]:
    """While entered, keys come one by one and are not shown."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
