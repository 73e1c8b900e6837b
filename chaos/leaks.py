"""Resources that the agents hold before the first life and after the last one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from chaos.judge import LEAK, Finding

# What an agent opens once and keeps; a heap grows in steps. What every life leaves is far more.
_FILES, _THREADS, _RESIDENT = 8, 8, 96 << 20
# It keeps 64 MiB of idle work buffers, some of which are files, of 1 MiB at least.
_WORK_FILE, _WORK_FILES = "/memfd:allfold-work", 64
# And what it has used within the last 5 s, however much that is.
_SETTLE_SECONDS, _PAUSE_SECONDS = 15.0, 0.25


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


def settled_leaks(node: str, before: Held, look: Callable[[], Held]) -> list[Finding]:
    """Return what an agent has too much of for long, after the last life."""
    deadline = monotonic() + _SETTLE_SECONDS
    while (found := leaks(node, before, look())) and monotonic() < deadline:
        sleep(_PAUSE_SECONDS)
    return found


def leaks(node: str, before: Held, after: Held) -> list[Finding]:
    """Return what an agent has too much of; nothing of one that was started anew."""
    if before.pid != after.pid:
        return []
    found = []
    had, has = _counted(before.files), _counted(after.files)
    if has.total() > had.total() + _FILES:
        found.append(f"files {had.total()} -> {has.total()}: {dict(has - had)} more")
    if after.processes > before.processes:
        found.append(f"processes {before.processes} -> {after.processes}")
    if after.threads > before.threads + _THREADS:
        found.append(f"threads {before.threads} -> {after.threads}")
    if after.resident > before.resident + _RESIDENT:
        found.append(f"resident {before.resident} -> {after.resident}")
    return [Finding(LEAK, f"{node}: {each}") for each in found]


def _counted(files: Counter[str]) -> Counter[str]:
    """Return the files without the work buffers that an agent may keep."""
    excess = max(0, files[_WORK_FILE] - _WORK_FILES)
    return files - Counter({_WORK_FILE: files[_WORK_FILE] - excess})


def _in_session(pid: int) -> int:
    """Return how many processes are in the session that a process leads."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # Behind the name, which may have blanks: state, parent, group, session.
            found += file.read_text().rpartition(")")[2].split()[3] == str(pid)
    return found


def _kinds(folder: Path) -> Iterator[str]:
    """Yield what each descriptor is: ``socket``, the name of a memfd, or the path of a file."""
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield re.sub(r":\[.*| \(deleted\)$", "", str(entry.readlink()))
