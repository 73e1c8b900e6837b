"""Items that arrive while a write is under way are written together, each with its own reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from allfold_core.errors import ServiceError
from allfold_orchestrator.store import batching
from allfold_orchestrator.store.batching import Batches

pytestmark = pytest.mark.anyio


class Writer:
    """Doubles numbers, when it is let; remembers what it was given at once."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.may_go_on = asyncio.Event()
        self.error: Exception | None = None
        self.batches = Batches(self.write, asyncio.Lock())

    async def write(self, items: Sequence[int]) -> list[int]:
        self.written.append(list(items))
        await self.may_go_on.wait()
        if self.error:
            raise self.error
        return [2 * item for item in items]

    async def submitted(self, *items: int) -> list[asyncio.Task[int]]:
        """Tasks that wait for the replies to ``items``."""
        tasks = [asyncio.create_task(self.batches.submit(item)) for item in items]
        await asyncio.sleep(0)
        return tasks


async def test_the_first_goes_alone_and_those_behind_it_together_in_their_order() -> None:
    writer = Writer()
    tasks = await writer.submitted(1, 2, 3, 4)
    writer.may_go_on.set()
    assert await asyncio.gather(*tasks) == [2, 4, 6, 8]
    assert writer.written in ([[1], [2, 3, 4]], [[1, 2, 3, 4]])
    assert writer.batches.waiting == 0


async def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MAX_BATCH", 3)
    writer = Writer()
    writer.may_go_on.set()
    assert await asyncio.gather(*await writer.submitted(*range(10))) == list(range(0, 20, 2))
    assert max(map(len, writer.written)) <= 3
    assert [item for batch in writer.written for item in batch] == list(range(10))


async def test_a_failed_write_is_told_to_all_in_it_and_the_next_one_works() -> None:
    writer = Writer()
    writer.error = ServiceError("no store")
    first = await writer.submitted(1, 2)
    writer.may_go_on.set()
    outcomes = await asyncio.gather(*first, return_exceptions=True)
    assert outcomes == [writer.error, writer.error]
    writer.error = None
    assert await writer.batches.submit(5) == 10


async def test_who_gives_up_before_its_turn_is_not_written() -> None:
    writer = Writer()
    async with writer.batches._lock:
        stays, leaves = await writer.submitted(1, 2)
        leaves.cancel()
        await asyncio.wait([leaves])
    writer.may_go_on.set()
    assert await stays == 2
    assert writer.written == [[1]]


async def test_who_gives_up_during_the_write_of_another_one_harms_nobody() -> None:
    writer = Writer()
    first, second, third = await writer.submitted(1, 2, 3)
    while not writer.written:
        await asyncio.sleep(0)
    third.cancel()
    await asyncio.wait([third])
    writer.may_go_on.set()
    assert [await first, await second] == [2, 4]


async def test_an_interrupted_writer_tells_the_others_of_its_batch() -> None:
    writer = Writer()
    async with writer.batches._lock:
        first, second = await writer.submitted(1, 2)
    while not writer.written:
        await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ServiceError, match="interrupted"):
        await second
