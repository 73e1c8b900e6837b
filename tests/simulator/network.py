"""The network between the hosts of a simulation: delays, and ways on which nothing passes.

What one process sends to another arrives in order. On a way that is cut it waits until that is
well, as TCP repeats it; what has been sent to a process that is dead is lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple, Unpack

from tests.support.virtual_loop import Process, VirtualLoop

T = TypeVar("T")
Args = TypeVarTuple("Args")

LOCAL_SECONDS = 20e-6
_USUAL, _LATE, _VERY_LATE = 0.0004, 0.01, 0.08
_LATE_SHARE, _VERY_LATE_SHARE = 0.02, 0.001

Way = tuple[str, str]
"""From one host to another."""
_Sent = tuple[Process, Process, Callable[..., object], tuple[Any, ...]]


class Network:
    """All ways between hosts.

    Attributes:
        cuts: the ways on which nothing passes now.
        slow: by host, the factor by which all that goes there or comes from there takes longer.
    """

    def __init__(self, loop: VirtualLoop, seed: int, latency: float = 1.0) -> None:
        self._usual = latency * _USUAL
        self.cuts: set[Way] = set()
        self.slow: dict[str, float] = {}
        self._loop = loop
        self._seed = seed
        self._rng: dict[Way, random.Random] = {}
        self._last: dict[tuple[Process, Process], float] = {}
        self._waiting: dict[Way, list[_Sent]] = {}

    def cut(self, source: str, target: str) -> None:
        """Let nothing pass from one host to another."""
        self.cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """Let everything pass again, first what has waited."""
        self.cuts.discard((source, target))
        for sender, receiver, callback, args in self._waiting.pop((source, target), ()):
            self.post(sender, receiver, callback, *args)

    def is_cut(self, source: str, target: str) -> bool:
        """Return True if nothing passes from one host to another."""
        return (source, target) in self.cuts

    def joins(self, one: str, other: str) -> bool:
        """Return True if messages pass in both directions."""
        return not ((one, other) in self.cuts or (other, one) in self.cuts)

    def delay(self, source: str, target: str) -> float:
        """Return the seconds that the next message takes."""
        if source == target:
            return LOCAL_SECONDS
        rng = self._rng.get((source, target))
        if rng is None:
            rng = random.Random(f"{self._seed} {source} {target}")
            self._rng[source, target] = rng
        drawn = rng.random()
        longest = self._usual
        if drawn < _LATE_SHARE:
            longest += _VERY_LATE if drawn < _VERY_LATE_SHARE else _LATE
        if self.slow:
            longest *= max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        return longest * (0.1 + rng.random())

    def post(
        self,
        sender: Process,
        receiver: Process,
        callback: Callable[[Unpack[Args]], object],
        *args: *Args,
    ) -> None:
        """Have a process call something, when the message of another one has come."""
        way = (sender.host, receiver.host)
        if way in self.cuts:
            self._waiting.setdefault(way, []).append((sender, receiver, callback, args))
            return
        pair = (sender, receiver)
        at = max(self._loop.time() + self.delay(*way), self._last.get(pair, 0.0))
        self._last[pair] = at
        self._loop.call_at(at, callback, *args, context=receiver.context)

    async def request(
        self,
        sender: Process,
        receiver: Process,
        make: Callable[[], Coroutine[Any, Any, T]],
        seconds: float,
    ) -> T:
        """Have another process do something and return what it does; ``TimeoutError`` if late."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def resolve(result: T | None, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)  # type: ignore[arg-type]
                else:
                    answer.set_exception(error)

        async def serve() -> None:
            try:
                result = await make()
            except Exception as error:  # noqa: BLE001 - it is the caller's
                self.post(receiver, sender, resolve, None, error)
            else:
                self.post(receiver, sender, resolve, result, None)

        self.post(sender, receiver, lambda: receiver.spawn(serve()))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            with suppress(asyncio.InvalidStateError):
                answer.cancel()
