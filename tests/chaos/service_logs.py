"""Exceptions that an agent or the orchestrator logged: each is a finding, whatever came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.chaos.judge import CRASH, Finding

_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 300


def exceptions(folder: Path) -> list[Finding]:
    """Return the exceptions in the logs of a folder, each with the message logged with it."""
    found = []
    for log in sorted(folder.glob("*.log")):
        for message, error in _logged(log.read_text(errors="replace").splitlines()):
            found.append(Finding(CRASH, f"{log.stem}: {message[:_LONGEST]} ... {error[:_LONGEST]}"))
    return found


def _logged(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each message that is followed by a traceback, and the last line of that."""
    for index, line in enumerate(lines):
        if line == _TRACEBACK and index:
            behind = (each for each in lines[index + 1 :] if not each.startswith(" "))
            yield lines[index - 1], next(behind, "")
