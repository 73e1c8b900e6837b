"""Resources that the agents hold before the first life and after the last one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.judge import LEAK, Finding

# What an agent opens once and keeps; a heap grows in steps. What every life leaves is far more.
_FILES, _THREADS, _RESIDENT = 8, 8, 96 << 20


@dataclass(frozen=True)
class Held:
    """The resources of a process, as the kernel counts them.

    Attributes:
        processes: itself, and what it has started.
    """

    pid: int
    processes: int
    files: Counter[str]
    threads: int
    resident: int

    @classmethod
    def of(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        return cls(
            pid,
            _in_session(pid),
            Counter(_kinds(process / "fd")),
            len(list((process / "task").iterdir())),
            int((process / "statm").read_text().split()[1]) * 4096,
        )


def leaks(node: str, before: Held, after: Held) -> list[Finding]:
    """Return what an agent has too much of; nothing of one that was started anew."""
    if before.pid != after.pid:
        return []
    found = []
    if after.files.total() > before.files.total() + _FILES:
        more = dict(after.files - before.files)
        found.append(f"files {before.files.total()} -> {after.files.total()}: {more} more")
    if after.processes > before.processes:
        found.append(f"processes {before.processes} -> {after.processes}")
    if after.threads > before.threads + _THREADS:
        found.append(f"threads {before.threads} -> {after.threads}")
    if after.resident > before.resident + _RESIDENT:
        found.append(f"resident {before.resident} -> {after.resident}")
    return [Finding(LEAK, f"{node}: {each}") for each in found]


def _in_session(pid: int) -> int:
    """Return how many processes are in the session that a process leads."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # Behind the name, which may have blanks: state, parent, group, session.
            found += file.read_text().rpartition(")")[2].split()[3] == str(pid)
    return found


def _kinds(folder: Path) -> Iterator[str]:
    """Yield what each descriptor is: ``socket``, ``/memfd``, or the path of a file."""
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield str(entry.readlink()).partition(":")[0]
