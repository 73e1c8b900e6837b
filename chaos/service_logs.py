"""Mistakes of their own that agents and the orchestrator have logged: each is a finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chaos.judge import CRASH, Finding

_OUT_OF_ORDER = "lock order: "
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 300


def exceptions(folder: Path) -> list[Finding]:
    """Return the exceptions in the logs of a folder, each with the message logged with it.

    And the locks that a service took out of order, which it does not always die of.
    """
    found = []
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for message, error in _logged(lines):
            found.append(Finding(CRASH, f"{log.stem}: {message[:_LONGEST]} ... {error[:_LONGEST]}"))
        inverted = [line[:_LONGEST] for line in lines if _OUT_OF_ORDER in line]
        found += [Finding(CRASH, f"{log.stem}: {line}") for line in inverted]
    return found


def _logged(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each message that is followed by a traceback, and the last line of that."""
    for index, line in enumerate(lines):
        if line == _TRACEBACK and index:
            behind = (each for each in lines[index + 1 :] if not each.startswith(" "))
            yield lines[index - 1], next(behind, "")
