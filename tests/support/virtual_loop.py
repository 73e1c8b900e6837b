"""An asyncio event loop on virtual time: when there is nothing to do, it is the next timer's time.

Nothing waits in it: a lease of five seconds is over as soon as all that comes before it is done.
There is no I/O. Code may belong to *processes*, which can be killed, and stopped for a while: what
a task of one schedules is its own, and runs only while it does.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import events
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast
from warnings import catch_warnings, simplefilter

T = TypeVar("T")
Args = TypeVarTuple("Args")

BEGIN = 1000.0
"""The time at which loops begin, so that it may be reckoned back from."""
MOST_AT_ONCE = 200_000
"""The callbacks at one moment after which the loop is taken for one that never gets further."""

_OWNER: ContextVar[Process | None] = ContextVar("process", default=None)


class Endless(RuntimeError):
    """Something goes on for ever without any time passing."""


class State(Enum):
    """The state of a process."""

    RUNS = 0
    STOPPED = 1
    DEAD = 2


class Process:
    """A process of the simulation.

    Attributes:
        name: of it, for people.
        host: the machine that it is on.
        state: a stopped process goes on where it was; of a dead one nothing is left.
    """

    def __init__(self, loop: VirtualLoop, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.state = State.RUNS
        self.context = copy_context()
        self.context.run(_OWNER.set, self)
        self._loop = loop
        self._held: list[_Handle] = []

    @property
    def runs(self) -> bool:
        """True if it is neither dead nor stopped."""
        return self.state is State.RUNS

    @property
    def lives(self) -> bool:
        """True if it is not dead."""
        return self.state is not State.DEAD

    def call(self, callback: Callable[[Unpack[Args]], object], *args: *Args) -> None:
        """Have the process call something soon."""
        self._loop.call_soon(callback, *args, context=self.context)

    def later(
        self, seconds: float, callback: Callable[[Unpack[Args]], object], *args: *Args
    ) -> None:
        """Have it call something after a while."""
        self._loop.call_later(seconds, callback, *args, context=self.context)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have it run a coroutine."""
        return self._loop.create_task(work, context=self.context.copy())

    def stop(self) -> None:
        """Let it do nothing until :meth:`go_on`."""
        if self.state is State.RUNS:
            self.state = State.STOPPED

    def go_on(self) -> None:
        """Let it do all that was due meanwhile."""
        if self.state is State.STOPPED:
            self.state = State.RUNS
            held, self._held = self._held, []
            self._loop.resume(held)

    def kill(self) -> None:
        """End it. Nothing of it runs any more, not even what should in the end."""
        self.state = State.DEAD
        self._held.clear()

    def hold(self, handle: _Handle) -> None:
        """Keep what is due until the process goes on."""
        if self.state is State.STOPPED:
            self._held.append(handle)


class _Handle(events.TimerHandle):
    """A callback that is due, or will be."""

    __slots__ = ("args", "at", "callback", "context", "is_cancelled", "owner")

    def __init__(
        self, at: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> None:
        self.at = at
        self.callback = callback
        self.args = args
        self.context = copy_context() if context is None else context
        self.owner = self.context.get(_OWNER)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.at


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop that never waits.

    Attributes:
        failures: of tasks that nobody has waited for, and of callbacks.
        steps: the callbacks that were run.
    """

    def __init__(self) -> None:
        self._now = BEGIN
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = count()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._is_closed = False
        self._is_running = False
        self.failures: list[BaseException] = []
        self.steps = 0

    # Time

    def time(self) -> float:
        return self._now

    def run_for(self, seconds: float) -> None:
        """Run everything that happens within the next seconds."""
        self._run(self._now + seconds, lambda: False)

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until a future or coroutine is done."""
        task = asyncio.ensure_future(cast(Awaitable[T], future), loop=self)
        self._run(float("inf"), task.done)
        if not task.done():
            raise Endless("all wait for each other, and for no time")
        return task.result()

    def _run(self, until: float, is_done: Callable[[], bool]) -> None:
        events._set_running_loop(self)
        self._is_running = True
        try:
            while not is_done() and (self._ready or self._pass_time(until)):
                self._run_ready(is_done)
        finally:
            self._is_running = False
            events._set_running_loop(None)
        if not is_done():
            self._now = until

    def _pass_time(self, until: float) -> bool:
        """Go to the time of the next timer; return False if there is none before ``until``."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heappop(timers)
        if not timers or timers[0][0] > until:
            return False
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heappop(timers)[2])
        return True

    def _run_ready(self, is_done: Callable[[], bool]) -> None:
        ready, first = self._ready, self.steps
        while ready and not is_done():
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            owner = handle.owner
            if owner is not None and owner.state is not State.RUNS:
                owner.hold(handle)
                continue
            self.steps += 1
            if self.steps - first > MOST_AT_ONCE:
                raise Endless(f"at one moment again and again: {handle.callback} {handle.args}")
            handle.context.run(handle.callback, *handle.args)

    def resume(self, handles: list[_Handle]) -> None:
        """Run callbacks that were held back."""
        self._ready.extend(handles)

    # What is scheduled

    def call_soon(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> _Handle:
        handle = _Handle(self._now, callback, args, context)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> _Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> _Handle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
        context: Context | None = None,
    ) -> _Handle:
        handle = _Handle(when, callback, args, context)
        if not self._is_closed:
            heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        if self._is_closed:
            coro.close()
            raise RuntimeError("the loop is closed")
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        """Do at once what others do in a thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future

    # The rest of what asyncio asks of a loop

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self._is_closed:
            self.failures.append(error)

    async def shutdown_asyncgens(self) -> None:
        return

    def close(self) -> None:
        """End all tasks where they are; what they would do in the end leads to nothing."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        logged, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
        events._set_running_loop(self)
        for task in list(self._tasks):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException), catch_warnings():
                simplefilter("ignore")  # some have never begun
                task.get_coro().close()
        events._set_running_loop(None)
        logging.root.manager.disable = logged
        self._tasks.clear()
