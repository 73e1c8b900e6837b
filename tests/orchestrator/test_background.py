"""Tasks of the process's length end when they are told to."""

from __future__ import annotations

import asyncio

import pytest

from allfold_orchestrator import background
from tests.support.waiting import within

pytestmark = pytest.mark.anyio


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 3:
                    raise

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await within(5, background.end(task))
    assert task.cancelled()


async def test_a_task_that_had_failed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise RuntimeError("a mistake of ours")

    task = asyncio.create_task(fails(), name="the task")
    await asyncio.wait([task])
    await within(5, background.end(task))
    assert "the task had failed" in caplog.text
