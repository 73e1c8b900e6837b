"""The locks of the agent, and the order in which a thread may take them.

Where the environment has ``ALLFOLD_CHECK_LOCKS=1``, as in the tests, each lock notes what its
thread holds and refuses to be taken out of order, so that a possible deadlock is found before it
happens. Elsewhere these functions return the locks of ``threading``, at no cost.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

log = logging.getLogger(__name__)

VARIABLE = "ALLFOLD_CHECK_LOCKS"

ORDER = {
    "peer check": "one check of the way to another node at a time",
    "probe": "one measurement of a link at a time",
    "connections": "the connections of the data port",
    "transfers": "the sockets of the state transfers that run",
    "tensors": "the states that ranks offer",
    "offer": "one block of an offered state at a time is asked of its rank",
    "pull": "what is left of a pull, and who fetches it",
    "pull sources": "the sources of a pull, and the connections to them",
    "pull channel": "what the rank of a pull is told, in order",
    "terms": "the announcements of terms that count since the last registration",
    "early notices": "news of groups whose plan is on its way",
    "registry": "the open groups by name",
    "group": "the ops of a group, their outcomes, and the members of its epochs",
    "incidents": "the incidents that this agent knows of",
    "errors": "the number of ops that have failed",
    "retransmits": "how many segments each connection has sent again",
    "retention": "how many groups keep results for other nodes",
    "p2p": "the sends and receives of a group",
    "out edge": "what waits to be sent over one edge, and what is not acknowledged",
    "pacer": "what the connections to other machines may send, and which of them wait",
    "executor": "the tasks of one op",
    "pieces": "how many pieces of a copy or a reduction are done",
    "stand-in": "the outcome of one op for a late rank, and the call of that",
    "residual": "what lossy compression owes to one series of ops",
    "gpu operands": "where the inputs of one op on a GPU are",
    "gpu work": "how much of one op a GPU is at work on",
    "gpus": "the GPUs that are in use",
    "gpu kernels": "one compilation of a kernel at a time",
    "gpu pins": "memory of the host that GPUs reach",
    "gpu completions": "the pieces of work that a GPU has been given",
    "gpu fences": "the fences that are polled",
    "buffers": "the idle work buffers",
    "rank": "the messages that a rank's socket has not taken yet",
    "links": "the connections of links on their way to the reactor",
    "link": "the messages that a link's connection has not taken yet",
    "tunnels": "the connections with TLS that one thread serves",
    "reactor": "the wake-up of the reactor, which may be closing",
    "lane": "the wake-up of the short lane's thread, which may be closing",
    "fence": "nothing: whoever takes it makes its stores visible to others",
}
"""By name, what they protect. Who holds one takes none above it, and no other of its name."""

_PLACES = {name: place for place, name in enumerate(ORDER)}

violations: list[str] = []
"""The violations found, so that none is missed where an exception was handled."""


class LockOrderError(AssertionError):
    """A thread was about to take a lock out of order."""


class _Held(threading.local):
    """The checked locks that the thread holds, in the order in which it took them."""

    def __init__(self) -> None:
        self.locks: list[CheckedLock] = []


_held = _Held()


class CheckedLock:
    """A lock of ``threading`` that is taken in order only. A ``Condition`` takes a reentrant one.

    Args:
        name: one of :data:`ORDER`.
        make: makes the lock.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._place = _PLACES[name]
        self._inner = make()
        self._reentrant = hasattr(self._inner, "_release_save")

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; ``LockOrderError`` where that might end in a deadlock."""
        if blocking:
            self._check()
        taken = bool(self._inner.acquire(blocking, timeout))
        if taken:
            _held.locks.append(self)
        return taken

    def release(self) -> None:
        """Release the lock."""
        self._inner.release()
        last = max(index for index, lock in enumerate(_held.locks) if lock is self)
        del _held.locks[last]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()

    def _check(self) -> None:
        held = _held.locks
        if any(lock is self for lock in held):
            if not self._reentrant:
                self._report("itself, which it cannot take twice")
            return
        for lock in held:
            if lock._place >= self._place:
                self._report(lock.name)

    def _report(self, held: str) -> None:
        thread = threading.current_thread().name
        violation = f"thread {thread} takes the lock '{self.name}' while it holds {held}"
        violations.append(violation)
        log.critical("lock order: %s", violation, stack_info=True)
        raise LockOrderError(violation)

    # What a Condition needs while it waits

    def _is_owned(self) -> bool:
        return any(lock is self for lock in _held.locks)

    def _release_save(self) -> tuple[int, Any]:
        count = sum(lock is self for lock in _held.locks)
        _held.locks = [lock for lock in _held.locks if lock is not self]
        return count, self._inner._release_save()

    def _acquire_restore(self, saved: tuple[int, Any]) -> None:
        count, state = saved
        self._check()
        self._inner._acquire_restore(state)
        _held.locks.extend([self] * count)


def _checks() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


if _checks():

    def make_lock(name: str) -> threading.Lock:
        """Return a lock; ``name`` is its place in :data:`ORDER`."""
        return cast(threading.Lock, CheckedLock(name, threading.Lock))

    def make_rlock(name: str) -> threading.RLock:
        """Return a lock that its thread may take again."""
        return cast(threading.RLock, CheckedLock(name, threading.RLock))

else:

    def make_lock(name: str) -> threading.Lock:  # noqa: ARG001
        """Return a lock; ``name`` is its place in :data:`ORDER`."""
        return threading.Lock()

    def make_rlock(name: str) -> threading.RLock:  # noqa: ARG001
        """Return a lock that its thread may take again."""
        return threading.RLock()


def make_condition(name: str) -> threading.Condition:
    """Return a condition with a lock of its own, which its thread may take again."""
    return threading.Condition(make_rlock(name))
