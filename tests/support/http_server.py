"""uvicorn in the loop of a test: it begins and ends as soon as it can."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn

from tests.support.waiting import DEADLINE_SECONDS, until, within


class Server(uvicorn.Server):
    """uvicorn, which looks ten times in a second for what it waits for, without its pauses."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._end = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the tests."""
        yield

    async def main_loop(self) -> None:
        """Serve until :meth:`end`."""
        await self.on_tick(0)
        await self._end.wait()

    def end(self) -> None:
        """Have :meth:`serve` return soon."""
        self.should_exit = True
        self._end.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Do as uvicorn: wait for what goes on, cancel what then still does, end the lifespan."""
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            idle = until(lambda: not (state.connections or state.tasks), "all has ended")
            await within(self.config.timeout_graceful_shutdown or DEADLINE_SECONDS, idle)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


@asynccontextmanager
async def serving(server: Server, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on a listening socket until the end of the block."""
    task = asyncio.create_task(server.serve([sock]))
    await until(lambda: server.started or task.done(), "it serves")
    try:
        yield
    finally:
        server.end()
        await within(DEADLINE_SECONDS, task)
