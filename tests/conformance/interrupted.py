"""The sweep over the lines of a call, for the tests of interrupted calls."""

from __future__ import annotations

from pathlib import Path

from tests.conformance import interrupt_programs
from tests.support.processes.ranks import CALL_SECONDS, Job, results


def sweep(job: Job, folder: Path, seconds: float = CALL_SECONDS, **options: object) -> list[str]:
    """Interrupt rank 0 in a call, at one line after another; return where that was."""
    path = str(folder / "mirror.sock")
    calls = [
        job.start(0, interrupt_programs.sweep, path=path, **options),
        job.start(1, interrupt_programs.mirror, path=path),
    ]
    found: list[str] = results(calls, seconds)[0]
    return found
