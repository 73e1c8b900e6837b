"""The sweeps over the lines of a call, for the tests of interrupted calls.

Together they take a processor five minutes, so they are in several files, which run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance import interrupt_programs
from tests.conformance.conftest import OP_SECONDS
from tests.conformance.interrupt_programs import SIZES
from tests.support.processes.ranks import CALL_SECONDS, Job, RankPool, results

SHAPES = {"1x2": (0, 0), "2x1": (0, 1)}
_SECONDS = 300.0
# Each way to call, and each shape, for each kind and size.
_WAYS = {
    "1x2-again-waits": {"fresh": False, "async_op": False},
    "2x1-fresh-waits": {"fresh": True, "async_op": False},
    "2x1-again-async": {"fresh": False, "async_op": True},
}


def each_sweep(*kinds: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what gives a test all sweeps of some kinds of call."""

    def give(test: Callable[..., None]) -> Callable[..., None]:
        for name, values in (("way", _WAYS), ("kind", kinds), ("size", SIZES)):
            test = pytest.mark.parametrize(name, list(values))(test)
        long: Callable[..., None] = pytest.mark.long(test)
        # The sweep's own limit is first.
        limited: Callable[..., None] = pytest.mark.timeout(_SECONDS + OP_SECONDS)(long)
        return limited

    return give


def sweep_all(pool: RankPool, folder: Path, way: str, kind: str, size: str) -> None:
    """Interrupt a call at each of its lines; fail where the group is not usable after that."""
    with pool.job(SHAPES[way.partition("-")[0]], timeout=OP_SECONDS) as job:
        assert sweep(job, folder, _SECONDS, kind=kind, size=size, **_WAYS[way])


def sweep(job: Job, folder: Path, seconds: float = CALL_SECONDS, **options: object) -> list[str]:
    """Interrupt rank 0 in a call, at one line after another; return where that was."""
    path = str(folder / "mirror.sock")
    calls = [
        job.start(0, interrupt_programs.sweep, path=path, **options),
        job.start(1, interrupt_programs.mirror, path=path),
    ]
    found: list[str] = results(calls, seconds)[0]
    return found
