"""Waiting for conditions: with a deadline, and never longer than it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from allfold_cluster.processes import wait_until

__all__ = ["never", "until", "until_found", "wait_until", "within"]

T = TypeVar("T")

# No measure of anything: what is awaited may be a process that starts on a busy machine.
DEADLINE_SECONDS = 30.0
PAUSE_SECONDS = 0.01


async def until(
    condition: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS
) -> None:
    """:func:`wait_until` for tests that run in the loop they wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(PAUSE_SECONDS)


async def until_found(
    ask: Callable[[], Awaitable[T]], what: str, seconds: float = DEADLINE_SECONDS
) -> T:
    """Return the first answer that is true; fail with ``what`` when there is none."""
    deadline = time.monotonic() + seconds
    while not (answer := await ask()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(PAUSE_SECONDS)
    return answer


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """The result, or ``TimeoutError``."""
    async with asyncio.timeout(seconds):
        return await awaitable


def never(_seconds: float, _task: Callable[[], None]) -> None:
    """In place of something that does a task after a while."""
