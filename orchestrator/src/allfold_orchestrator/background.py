"""The end of tasks that run for as long as the process does."""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger(__name__)

HEARD_SECONDS = 0.05


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a background task, and return once it has ended.

    It is asked more than once, because before Python 3.12 ``asyncio.wait_for``, which redis-py
    uses for every command, loses a cancellation that comes while what it waits for ends.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=HEARD_SECONDS)
    if not task.cancelled() and task.exception() is not None:
        log.error("%s had failed: %r", task.get_name(), task.exception())
