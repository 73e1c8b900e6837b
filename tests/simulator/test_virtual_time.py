"""Virtual time: nothing waits, and processes are stopped and killed between any two callbacks."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from allfold_agent.membership import registration
from tests.support.virtual_clock import virtual_time
from tests.support.virtual_loop import Endless, Process


def test_an_hour_is_over_at_once_for_the_loop_and_for_the_product() -> None:
    real = monotonic()
    with virtual_time() as loop:
        begun = loop.time()
        loop.run_until_complete(asyncio.sleep(3600))
        assert loop.time() - begun == 3600
        assert registration.monotonic() == loop.time()  # type: ignore[attr-defined]
    assert registration.monotonic() - real < 3600  # type: ignore[attr-defined]


def test_a_stopped_process_does_later_what_was_due_and_a_dead_one_never() -> None:
    with virtual_time() as loop:
        done: list[tuple[str, float]] = []
        begun = loop.time()

        async def work(name: str) -> None:
            await asyncio.sleep(1.0)
            done.append((name, loop.time() - begun))

        processes = {name: Process(loop, name, name) for name in ("a", "b", "c")}
        for name, process in processes.items():
            process.spawn(work(name))
        loop.run_for(0.5)
        processes["b"].stop()
        processes["c"].kill()
        loop.run_for(2.0)
        processes["b"].go_on()
        loop.run_for(0.0)
        assert done == [("a", 1.0), ("b", 2.5)]


def test_a_wait_for_what_never_comes_is_an_error() -> None:
    with virtual_time() as loop, pytest.raises(Endless, match="wait for each other"):
        loop.run_until_complete(asyncio.Event().wait())
