"""Leaving on request: this process got SIGTERM, or its node drains.

A rank of an elastic group leaves at a boundary: before its next collective, when all ops that it
has called are done. The others go on without it, and no op has to be repeated.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, NoReturn

from allfold._process.fork_memory import disown_in_children
from allfold_core.errors import AllfoldError

_LONGEST = 200


class Parting(NamedTuple):
    """The way in which a rank leaves.

    Attributes:
        how: a phrase to follow the rank's name: ``exited``.
        failed: an exception is the cause.
    """

    how: str
    failed: bool


def by_call() -> Parting:
    """Return the parting of a rank that calls ``shutdown``, perhaps while it handles an error."""
    error = sys.exc_info()[1]
    if error is None or _is_success(error):
        return Parting("left the group", failed=False)
    return Parting(f"left the group because of an exception ({_described(error)})", failed=True)


def at_exit() -> Parting:
    """Return the parting of a process that ends.

    The status given to ``sys.exit`` is not known: the interpreter drops it before it ends.
    """
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # of an interactive one, it may be of long ago
        return Parting("exited", failed=False)
    return Parting(f"ended with an exception ({_described(error)})", failed=True)


def _is_success(error: BaseException) -> bool:
    """Tell if it is the end of a script that calls ``sys.exit()`` or ``sys.exit(0)``."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _described(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


log = logging.getLogger("allfold")


class Drained(SystemExit):
    """Ends a process that was told to leave, once it has left its groups, with status 0.

    As it is a ``SystemExit``, ``finally`` and ``with`` blocks run, ``except Exception`` does not
    catch it, and nothing is printed.

    Attributes:
        reason: why it was told to leave, a phrase to follow "as".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return f"this process has left its groups, as {self.reason}"


class LeaveRequest:
    """The request that this process leave its groups, and its execution.

    SIGTERM is handled while the process is in a group that it can leave, if its main thread has
    opened one and the program has no handler of its own. A second SIGTERM ends the process at once.

    Args:
        leave_all: leaves all groups of the process.

    Attributes:
        reason: why it is to leave, a phrase to follow "as"; ``None`` without a request.
        has_left: True once the groups were left for that reason.
    """

    def __init__(self, leave_all: Callable[[Parting], None]) -> None:
        self.reason: str | None = None
        self.has_left = False
        self._leave_all = leave_all
        self._watching = False
        self._signals = 0
        self._leaving = threading.RLock()
        disown_in_children(self)

    def begin_anew(self) -> None:
        """Reset everything, for a new connection to an agent."""
        self.reason, self.has_left, self._signals = None, False, 0

    def watch(self, *, watching: bool) -> None:
        """Handle SIGTERM while the process is in a group that it can leave, and only then."""
        if watching and not self._watching:
            self._handle_signal()
        elif self._watching and not watching:
            self._handle_no_signal()
        self._watching = watching

    def tell(self, reason: str) -> None:
        """Log and note the request to leave; the first reason counts. Not for signal handlers."""
        if self.reason is None and self._watching:
            log.warning("this process leaves its groups at the next boundary, as %s", reason)
        elif self.reason is None:
            log.warning("%s; this process goes on, as none of its groups is elastic", reason)
        self.ask(reason)

    def ask(self, reason: str) -> None:
        """Note the request to leave, and do nothing else: a signal handler may call it."""
        self.reason = self.reason or reason

    def leave(self) -> NoReturn:
        """Leave all groups, unless they were left before, and raise ``Drained``."""
        reason = self.reason or "it was told to"
        with self._leaving:
            if not self.has_left:
                self.has_left = True
                try:
                    self._leave_all(Parting(f"left the group, as {reason}", failed=False))
                except AllfoldError as error:
                    log.warning("could not leave in order: %s", error)
        raise Drained(reason)

    # SIGTERM

    def _handle_signal(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _handle_no_signal(self) -> None:
        """Restore the default action of SIGTERM; outside the main thread, our handler stays."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        if self._watching and self._signals == 1:
            self.ask("it got SIGTERM")
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def disown(self) -> None:
        """Restore the default action of SIGTERM in a forked child."""
        self._leaving = threading.RLock()
        self._handle_no_signal()
        self._watching = False
