"""Batching of small writes into large ones, without a delay.

What arrives while a write is under way is written together by the next one. So an idle service
answers at once, and a busy one pays the way to the store once for hundreds of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from allfold_core.errors import ServiceError

Item = TypeVar("Item")
Reply = TypeVar("Reply")

MAX_BATCH = 512


@dataclass(frozen=True, slots=True, eq=False)
class _Request(Generic[Item, Reply]):
    item: Item
    reply: asyncio.Future[Reply]


class Batches(Generic[Item, Reply]):
    """Collects items and writes them in the order in which they came.

    Args:
        write: writes some items, and returns a reply for each.
        lock: is held while it does.
    """

    def __init__(
        self, write: Callable[[Sequence[Item]], Awaitable[Sequence[Reply]]], lock: asyncio.Lock
    ) -> None:
        self._write = write
        self._lock = lock
        self._pending: list[_Request[Item, Reply]] = []

    @property
    def waiting(self) -> int:
        """The number of items that are not being written yet."""
        return len(self._pending)

    async def submit(self, item: Item) -> Reply:
        """Write ``item`` and return its reply; raises the error with which its write failed."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        request = _Request(item, reply)
        self._pending.append(request)
        try:
            async with self._lock:
                while not reply.done():
                    await self._write_pending()
            return await reply
        finally:
            if not reply.done() and request in self._pending:
                self._pending.remove(request)  # the caller gave up before its turn came

    async def _write_pending(self) -> None:
        """Write the pending items, oldest first."""
        batch, self._pending = self._pending[:MAX_BATCH], self._pending[MAX_BATCH:]
        try:
            replies = await self._write([request.item for request in batch])
        except BaseException as error:
            _fail(batch, error)
            if not isinstance(error, Exception):
                raise
            return
        for request, reply in zip(batch, replies, strict=True):
            if not request.reply.done():
                request.reply.set_result(reply)


def _fail(batch: Sequence[_Request[Item, Reply]], error: BaseException) -> None:
    """Fail all requests of a batch."""
    reported = error if isinstance(error, Exception) else _interrupted()
    for request in batch:
        if not request.reply.done():
            request.reply.set_exception(reported)
            request.reply.exception()  # seen, even if the caller was the one who was interrupted


def _interrupted() -> ServiceError:
    return ServiceError(
        "the orchestrator was interrupted while it wrote; try again", component="store", retry=True
    )
