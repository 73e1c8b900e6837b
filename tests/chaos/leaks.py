"""What the agents hold before the first life and after the last one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.judge import LEAK, Finding

# What an agent opens once and keeps; a heap grows in steps. What every life leaves is far more.
_FILES, _THREADS, _RESIDENT = 8, 8, 96 << 20


@dataclass(frozen=True)
class Held:
    """The resources of a process, as the kernel counts them."""

    pid: int
    files: int
    threads: int
    resident: int

    @classmethod
    def of(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        return cls(
            pid,
            len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())),
            int((process / "statm").read_text().split()[1]) * 4096,
        )


def leaks(node: str, before: Held, after: Held) -> list[Finding]:
    """Return what an agent has too much of; nothing of one that was started anew."""
    if before.pid != after.pid:
        return []
    limits = (("files", _FILES), ("threads", _THREADS), ("resident", _RESIDENT))
    return [
        Finding(LEAK, f"{node}: {name} {getattr(before, name)} -> {getattr(after, name)}")
        for name, slack in limits
        if getattr(after, name) > getattr(before, name) + slack
    ]
