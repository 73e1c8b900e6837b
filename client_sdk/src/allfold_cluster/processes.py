"""Start, watch and end child processes.

Every child leads a session of its own, so that a signal reaches it with all that it started, and
so that a Ctrl-C in the terminal reaches this process only, which then decides. A child dies with
the *thread* that started it, also when that is killed (see ``child``): start children from the
main thread, or from one that outlives them.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

_SHIM = str(Path(__file__).with_name("child.py"))
_AFTER_KILL_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 0.01

Redirection = int | IO[Any] | None


class Waitable(Protocol):
    """Something that can be waited for."""

    def fileno(self) -> int: ...


F = TypeVar("F", bound=Waitable)


def wait_for(
    readable: Iterable[F], seconds: float | None, *, writable: Iterable[Waitable] = ()
) -> list[F]:
    """Wait until something is readable or writable, or the time is over; what is readable.

    Not ``select.select``, which cannot watch descriptors from 1024 on.
    """
    by_fd = {item.fileno(): item for item in readable}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    for item in writable:
        poll.register(item.fileno(), select.POLLOUT)
    ready = poll.poll(None if seconds is None else math.ceil(max(0.0, seconds) * 1000))
    return [by_fd[fd] for fd, _ in ready if fd in by_fd]


def wait_until(
    condition: Callable[[], object],
    what: str,
    seconds: float = _PATIENCE_SECONDS,
    pause: float = _LOOK_AGAIN_SECONDS,
) -> None:
    """Return as soon as ``condition()`` is true.

    Args:
        what: the condition in words, for the error.
        pause: seconds between two looks; longer where to look is dear, because what starts
            processes takes time from the awaited.

    Raises:
        TimeoutError: it has stayed false.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


class Child:
    """A running process with all that it starts. ``fileno`` is readable once it has ended.

    Args:
        inherits: the descriptors that it has besides its streams, under the same numbers.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: Redirection = subprocess.DEVNULL,
        stdout: Redirection = None,
        stderr: Redirection = None,
        inherits: Collection[int] = (),
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _SHIM, str(os.getpid()), *command],
            env=dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            pass_fds=inherits,
            start_new_session=True,
        )
        self.stdout, self.stderr = self._process.stdout, self._process.stderr
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # no descriptors left: nobody could watch it
            self._process.kill()
            self._process.wait()
            self.close_streams()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._pidfd

    @property
    def status(self) -> int | None:
        """The exit status once reaped; 128 + n for a death by signal n."""
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def killed_by(self) -> int:
        """The signal that killed it; 0 when it ended by itself, or is not reaped."""
        return max(0, -(self._process.returncode or 0))

    @property
    def ending(self) -> str:
        """The way it ended, once reaped: ``ended with status 3``, ``was killed by SIGKILL``."""
        if self.killed_by:
            return f"was killed by {signal.Signals(self.killed_by).name}"
        return f"ended with status {self.status}"

    @property
    def ended(self) -> bool:
        """True once the process itself is over, reaped or not."""
        return self.status is not None or bool(wait_for([self], 0))

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        # Once reaped, the number may belong to somebody else.
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def reap(self) -> int:
        """The status of a process that has ended; what it left behind is killed."""
        if self.status is None:
            # Before the wait: the unreaped leader keeps the group's number ours.
            self.signal(signal.SIGKILL)
            self._process.wait()
            os.close(self._pidfd)
        assert self.status is not None
        return self.status

    def close_streams(self) -> None:
        """Close what is read from the process."""
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def stop_all(children: Iterable[Child], *, grace: float = 5.0) -> None:
    """End children together: SIGTERM, and SIGKILL for those left after ``grace`` seconds."""
    running = [child for child in children if child.status is None]
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _AFTER_KILL_SECONDS)):
        for child in running:
            child.signal(number)
        running = _reap_until(running, time.monotonic() + seconds)
    if running:
        names = ", ".join(f"{child.name} (pid {child.pid})" for child in running)
        raise RuntimeError(f"still there after SIGKILL: {names}")


def _reap_until(running: list[Child], deadline: float) -> list[Child]:
    """Reap what ends before the deadline; those that did not."""
    while running:
        ended = wait_for(running, deadline - time.monotonic())
        if not ended:
            break
        for child in ended:
            child.reap()
        running = [child for child in running if child.status is None]
    return running
