"""The reason why a rank is late, from two looks at its process and from its stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allfold_core.incident import Cause

# A process that got less than a fifth of the CPU time that it wanted is starved.
_STARVED_SHARE = 0.8
# Below this share of a window it has wanted next to nothing.
_LEAST_WANTED = 0.3
_STOPPED = {"T": "is stopped by a signal (SIGSTOP)", "t": "is stopped by a debugger"}
_ENDED = frozenset("ZX")
_OUR_PACKAGE = "allfold"


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """One look at a process, from the kernel's accounts.

    Attributes:
        at: when (monotonic).
        state: of its main thread, as in ``/proc/<pid>/stat``; ``X`` where there is none any more,
            ``""`` where it is not known.
        ran: seconds for which its main thread has had a CPU so far.
        queued: seconds for which its main thread was ready, but had none.
        waits_in: the kernel's function in which its main thread sleeps, ``""`` if unknown.
    """

    at: float
    state: str
    ran: float = 0.0
    queued: float = 0.0
    waits_in: str = ""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One Python function that is being executed.

    Attributes:
        function: its name.
        file: the path of its file.
        line: the line that is being executed.
    """

    function: str
    file: str
    line: int

    @property
    def is_library(self) -> bool:
        """True for code that comes with Python or was installed."""
        return self.file.startswith("<") or any(
            part in self.file for part in ("site-packages/", "dist-packages/", "/lib/python")
        )

    @property
    def is_ours(self) -> bool:
        """True for the code of the SDK."""
        return f"/{_OUR_PACKAGE}/_" in self.file or f"/{_OUR_PACKAGE}/torch/" in self.file

    def __str__(self) -> str:
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


@dataclass(frozen=True, slots=True)
class PythonThread:
    """One Python thread of a process.

    Attributes:
        is_main: True for the main thread.
        name: as Python knows it, ``""`` if unknown.
        is_active: True while it runs on a CPU, or wants to.
        has_lock: True for the thread that has the interpreter lock.
        frames: the innermost first.
    """

    is_main: bool
    name: str
    is_active: bool
    has_lock: bool
    frames: tuple[StackFrame, ...]


Stacks = Sequence[PythonThread]
"""The Python threads of a process; empty where they cannot be read."""


@dataclass(frozen=True, slots=True)
class LateCause:
    """The reason why a rank is late.

    Attributes:
        phrase: to follow "its process".
        may_be_in_call: it waits in a call of Allfold, or for something that cannot be seen.
    """

    cause: Cause
    phrase: str
    may_be_in_call: bool = False


def explain(first: ProcessLook, last: ProcessLook, stacks: Stacks, again: Stacks = ()) -> LateCause:
    """Return why a process has not called an op between two looks at it.

    Args:
        stacks: at the last look.
        again: a moment later, where somebody seemed to hold the interpreter lock.
    """
    if last.state in _ENDED:
        return LateCause(Cause.EXITED_RANK, "has ended")
    if last.state in _STOPPED and first.state in _STOPPED:
        return LateCause(Cause.STOPPED_RANK, _STOPPED[last.state])
    starved = _starved(first, last)
    if starved:
        return LateCause(Cause.STARVED_RANK, starved)
    holder = lock_holder(stacks)
    if holder is not None and (now := lock_holder(again)) is not None and now == holder:
        return LateCause(Cause.LOCKED_RANK, _describe_lock(holder))
    main = next((thread for thread in stacks if thread.is_main and thread.frames), None)
    if main is not None:
        in_call = any(frame.is_ours for frame in main.frames)
        return LateCause(Cause.LATE_RANK, f"is in {describe_frames(main.frames)}", in_call)
    return LateCause(Cause.LATE_RANK, _describe_state(last), last.state not in ("D", "R"))


def lock_holder(stacks: Stacks) -> PythonThread | None:
    """Return the thread that keeps the interpreter lock from others; ``None`` if nobody does.

    The main thread may compute with the lock, but has no reason to sleep with it. Another thread
    may hold it for a moment.
    """
    for thread in stacks:
        if thread.has_lock and not (thread.is_main and thread.is_active):
            return thread
    return None


def starved_share(first: ProcessLook, last: ProcessLook) -> float:
    """Return for which part of the time between two looks a process was ready, but had no CPU."""
    window = last.at - first.at
    return max(0.0, last.queued - first.queued) / window if window > 0 else 0.0


def _starved(first: ProcessLook, last: ProcessLook) -> str:
    ran, queued = last.ran - first.ran, last.queued - first.queued
    window, wanted = last.at - first.at, ran + queued
    if window <= 0 or wanted < _LEAST_WANTED * window or queued < _STARVED_SHARE * wanted:
        return ""
    return (
        f"is ready to run, but its machine gave it a CPU for only {ran:.2f} s of the last "
        f"{window:.1f} s"
    )


def _describe_lock(holder: PythonThread) -> str:
    who = "its main thread" if holder.is_main else f"thread {holder.name or 'without a name'}"
    place = f" in {describe_frames(holder.frames)}" if holder.frames else ""
    return f"cannot run Python: {who} keeps the interpreter lock{place}"


def _describe_state(last: ProcessLook) -> str:
    if last.state == "D":
        where = f" ({last.waits_in})" if last.waits_in else ""
        return f"waits for a disk or a network file system{where}"
    if last.state == "R":
        return "runs something else; its stack cannot be read"
    where = f" ({last.waits_in})" if last.waits_in else ""
    return f"waits for something else{where}; its stack cannot be read"


def describe_frames(frames: Sequence[StackFrame]) -> str:
    """Return where a thread is: the innermost function, and what the user wrote that called it.

    Of the SDK's own functions only the outermost, which is the one that the user has called.
    """
    ours = [frame for frame in frames if frame.is_ours]
    inner = ours[-1] if ours else frames[0]
    shown = _name_of_ours(inner) if ours else str(inner)
    outside = frames[frames.index(inner) + 1 :]
    caller = next((frame for frame in outside if not frame.is_library), None)
    if caller is None or (not ours and not inner.is_library):
        return shown
    return f"{shown}, called from {caller}"


def _name_of_ours(frame: StackFrame) -> str:
    """Return what the user has called; methods of groups are made by a function."""
    is_made = "<locals>" in frame.function
    return f"a call of {_OUR_PACKAGE}" if is_made else f"{_OUR_PACKAGE}.{frame.function}"
