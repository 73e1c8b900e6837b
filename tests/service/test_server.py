"""The end of a service: SIGTERM lets it drain first, whatever is in a hurry does not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from allfold_service.server import Server, write_ready_file

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Drain:
    """A drain that takes as long as a test wants."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.server = Server("no:app", None, keep_alive=1, graceful=1, drain=self._run)
        self.server.end_at_signals()

    async def _run(self) -> None:
        self.begun.set()
        await self.goes_on.wait()

    async def sees(self, number: signal.Signals) -> None:
        """Send a signal, and let the loop take it in."""
        seen = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, seen.set)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR1)
        async with asyncio.timeout(10.0):
            await seen.wait()


async def test_a_service_serves_until_it_has_drained() -> None:
    drain = Drain()
    await drain.sees(signal.SIGTERM)
    async with asyncio.timeout(10.0):
        await drain.begun.wait()
    assert not drain.server.should_exit
    drain.goes_on.set()
    async with asyncio.timeout(10.0):
        while not drain.server.should_exit:
            await asyncio.sleep(0)


async def test_a_second_sigterm_cuts_the_drain_short() -> None:
    drain = Drain()
    await drain.sees(signal.SIGTERM)
    await drain.sees(signal.SIGTERM)
    assert drain.server.should_exit


async def test_sigint_ends_a_service_without_a_drain() -> None:
    drain = Drain()
    await drain.sees(signal.SIGINT)
    assert drain.server.should_exit
    assert not drain.begun.is_set()


def test_the_ready_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    write_ready_file(path, "127.0.0.1:1")
    write_ready_file(str(path), "127.0.0.1:22222")
    assert path.read_text() == "127.0.0.1:22222"
    assert list(tmp_path.iterdir()) == [path]
