"""The end of a program that is told to end: in order, not at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def end_in_order() -> None:
    """Have SIGTERM and SIGHUP raise ``SystemExit``: every ``with`` ends what it has started.

    Under nohup, SIGHUP stays ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
