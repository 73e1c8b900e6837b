"""Threads that complete futures; torch's compiler and profiler at the methods that torch calls."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial, wraps
from threading import Condition, Thread, current_thread
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from allfold._handles.work import Work, wait_for_any

_Hidden = TypeVar("_Hidden")


def uncompiled(hidden: _Hidden) -> _Hidden:
    """Keep Dynamo from compiling and inlining a function or the methods of a class.

    The same goes for whatever they call. Dynamo breaks the graph at such a call and runs it as it
    is, as with the C++ methods of torch's own process groups. ``torch.compiler.disable`` does that
    too, but imports Dynamo, which takes more than a second, and wraps each call.
    """
    skip = eval_frame._FrameAction.SKIP
    never = eval_frame._FrameExecStrategy(skip, skip)
    functions: Iterable[Any] = (
        [hidden] if isinstance(hidden, FunctionType) else vars(hidden).values()
    )
    for function in functions:
        if isinstance(function, FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, never)
            function.__dict__["_torchdynamo_disable"] = True
    return hidden


log = logging.getLogger("allfold")

T = TypeVar("T")

_LOOK_AGAIN_SECONDS = 60.0
_IDLE_SECONDS = 1.0


class FutureProgress:
    """Completes futures when their ops are done, which runs the callbacks of the futures.

    The thread starts with the first op that it watches, and ends after a while without one, since
    not all callers say when they have asked for their last future.

    Args:
        name: of the thread.
        ordered: complete futures in the order in which they were asked for, even where an op is
            done before another: callbacks that call collectives need an order that is the same on
            all ranks. Messages between two ranks need none.
    """

    def __init__(self, name: str, *, ordered: bool = True) -> None:
        self._name = name
        self._ordered = ordered
        self._changed = Condition()
        self._watched: dict[Work, Callable[[], None]] = {}
        self._closed = False
        self._thread: Thread | None = None
        self._nested: FutureProgress | None = None

    def future(
        self,
        ops: Sequence[Work],
        outcome: Callable[[], T],
        tensors: Sequence[torch.Tensor] = (),
    ) -> torch.futures.Future[T]:
        """Return a future of ``outcome()``, called when all ops are done; it fails as that does.

        Where ``tensors`` are on GPUs, torch has ``outcome`` called with streams of its own, which
        wait for the results; the streams of a thread that waits for the future wait for these.

        An exception that is *set* on a future would reach DDP as if it were a tensor. One that is
        raised by the function of a ``then`` is an error for C++ as well.
        """
        gpus: list[Any] = list({tensor.device for tensor in tensors if tensor.is_cuda})
        over: torch.futures.Future[None] = torch.futures.Future(devices=gpus or None)
        given: torch.futures.Future[T] = over.then(lambda _: outcome())
        self._complete(over, list(ops))
        return given

    def close(self, seconds: float) -> None:
        """End the threads once the ops that they watch are done; wait ``seconds`` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if self._nested is not None:
            self._nested.close(seconds)
        if thread is not None and thread is not current_thread():
            thread.join(seconds)

    def _complete(self, over: torch.futures.Future[None], ops: list[Work]) -> None:
        """Complete ``over`` now, or when its ops are done."""
        _drop_the_done(ops)
        if ops:
            self._watch(ops[0], partial(self._resume, over, ops))
        else:
            over.set_result(None)

    def _resume(self, over: torch.futures.Future[None], ops: list[Work]) -> None:
        """Go on with the next op, which takes the place of the one that is done."""
        _drop_the_done(ops)
        if ops:
            with self._changed:
                self._watched = {ops[0]: partial(self._resume, over, ops), **self._watched}
        else:
            over.set_result(None)

    def _watch(self, work: Work, then: Callable[[], None]) -> None:
        """Call ``then`` once ``work`` has an outcome or is overdue."""
        if current_thread() is self._thread:
            # A callback asks for a future, and may wait for it here and now.
            if self._nested is None:
                self._nested = FutureProgress(self._name, ordered=self._ordered)
            self._nested._watch(work, then)
            return
        with self._changed:
            self._watched[work] = then
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        # Its answer may have come before it was watched, and no other need follow.
        if not self._ordered and work.is_completed():
            self._call_back(work)

    def _run(self) -> None:
        while (watched := self._next()) is not None:
            for work in wait_for_any(watched, _LOOK_AGAIN_SECONDS):
                self._call_back(work)

    def _next(self) -> Collection[Work] | None:
        """Return the ops to wait for now; ``None`` where the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched or self._closed, _IDLE_SECONDS)
            if not self._watched:
                self._thread = None
                return None
            return list(self._watched)[:1] if self._ordered else self._watched

    def _call_back(self, work: Work) -> None:
        """Call back for an op, once: of two threads, the first one does."""
        then = self._watched.pop(work, None)
        if then is None:
            return
        try:
            then()
        except Exception:
            log.exception("a callback of a future failed")


def _drop_the_done(ops: list[Work]) -> None:
    while ops and (ops[0].is_completed() or ops[0].is_overdue()):
        ops.pop(0)


Given = ParamSpec("Given")
Result = TypeVar("Result")


def profiled(
    kind: str, tensors: str | None = None
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Show the calls of a method as ``allfold:<kind>``, with the shapes of their tensors.

    A call, and not its op as in torch's own backends: an event that is open when the profile ends
    is written into memory that is freed by then (torch 2.13 and 2.15), and an op may be in flight.

    Args:
        kind: the name that Gloo gives it.
        tensors: the argument with a tensor, or lists of tensors.
    """

    def decorate(method: Callable[Given, Result]) -> Callable[Given, Result]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(*args: Given.args, **named: Given.kwargs) -> Result:
            if not profiler._is_profiler_enabled:
                return method(*args, **named)
            given = signature.bind(*args, **named).arguments
            shown = flat([given[tensors]]) if tensors else []
            with _RecordFunctionFast(f"allfold:{kind}", shown):
                return method(*args, **named)

        return call

    return decorate


def flat(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors of nested lists as one list."""
    if isinstance(tensors, list | tuple):
        return [each for item in tensors for each in flat(item)]
    return [tensors]
