"""The calls of a rank whose results are not in place yet, and the thread that sees to them."""

from __future__ import annotations

import logging
from threading import Condition, Event, RLock, Thread
from typing import Any, Generic, Protocol, TypeVar

from allfold._process.fork_memory import disown_in_children
from allfold._session.connection import AgentConnection

log = logging.getLogger("allfold")

# The pause before the lander looks for the first time; each one after it is twice as long.
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.05
_IDLE_SECONDS = 1.0
_END_SECONDS = 5.0


class UnfinishedCall(Protocol):
    """A call whose result is not in place."""

    @property
    def number(self) -> int:
        """The number of the op in its group, or of the message."""

    def settle_if_done(self) -> None:
        """Put a result that has arrived in place."""

    def land_if_done(self) -> None:
        """Do as :meth:`settle_if_done`; a failure of that is the outcome of the call."""


T = TypeVar("T", bound=UnfinishedCall)


class InFlight(Generic[T]):
    """The collectives of a rank in one group, or its messages, whose results are not in place.

    Attributes:
        works: by their numbers, in the order of the calls.
        landing: held while a result is put in place. A handler of a signal may come in between.
    """

    def __init__(self, connection: AgentConnection, lander: Lander) -> None:
        self._connection = connection
        self._lander = lander
        self.works: dict[int, T] = {}
        self.landing = RLock()
        disown_in_children(self)

    def watch(self) -> None:
        """See to the results, for which no thread may wait."""
        if self.works:
            self._lander.watch(self)

    def tidy(self) -> None:
        """Process replies, so that the agent can go on sending, and settle what is done."""
        self._connection.drain()
        for work in list(self.works.values()):
            work.settle_if_done()

    def land(self) -> None:
        """Do as :meth:`tidy`, in a thread of its own: every failure is the outcome of its op."""
        self._connection.drain()
        for work in list(self.works.values()):
            work.land_if_done()

    def settle_before(self, number: int) -> None:
        """Settle what is done of the calls before one."""
        for work in list(self.works.values()):
            if work.number >= number:
                return
            work.settle_if_done()

    def disown(self) -> None:
        """In a forked child: another thread of the parent may have been putting a result in place.

        That thread does not exist here.
        """
        self.landing = RLock()


class Lander:
    """A thread that puts results in place for which no thread of the program waits.

    A program may drop a handle, or do something else for a long time. The thread starts with the
    first handle that the program is given. It looks now and then, and reads nothing in between: the
    program's own threads need not take turns with it. Without anything in flight it ends.
    """

    def __init__(self) -> None:
        self._watched: set[InFlight[Any]] = set()
        self._begin()
        disown_in_children(self)

    def _begin(self) -> None:
        self._lock = RLock()
        self._changed = Condition(self._lock)  # its own "with" can leave the lock taken
        self._closing = Event()
        self._thread: Thread | None = None

    def watch(self, flights: InFlight[Any]) -> None:
        """See to what is in flight there now, and until nothing is."""
        if flights in self._watched:
            return
        with self._lock:
            if self._is_running():
                # Last: if an exception comes up before, the next call does it all again.
                self._watched.add(flights)
                self._changed.notify()

    def _is_running(self) -> bool:
        """Start the thread, unless it runs; return False if it cannot."""
        if self._closing.is_set():
            return False
        if self._thread is not None and self._thread.is_alive():
            return True
        self._thread = Thread(target=self._run, name="allfold-lander", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter ends, or there may be no more threads
            log.debug("results are put in place when they are waited for: %s", error)
            return False
        return True

    def close(self) -> None:
        """End the thread, and wait for it: it may be writing to memory of the program's."""
        with self._lock:
            self._closing.set()
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread.is_alive():
            thread.join(_END_SECONDS)

    def disown(self) -> None:
        """In a forked child, which has no such thread."""
        self._watched.clear()
        self._begin()

    def _run(self) -> None:
        while self._await_some():
            pause = _FIRST_PAUSE_SECONDS
            while self._watched and not self._closing.wait(pause):
                self._look(is_last=pause == _LONGEST_PAUSE_SECONDS)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _await_some(self) -> bool:
        """Wait until there is something in flight; return False if the thread has to end."""
        with self._lock:
            self._changed.wait_for(lambda: self._watched or self._closing.is_set(), _IDLE_SECONDS)
            if self._watched and not self._closing.is_set():
                return True
            self._thread = None
            return False

    def _look(self, *, is_last: bool) -> None:
        for flights in list(self._watched):
            flights.land()
            if is_last and not flights.works:
                self._watched.discard(flights)
                # The order matters: a call is put in there first, and then it looks in here.
                if flights.works:
                    self._watched.add(flights)
