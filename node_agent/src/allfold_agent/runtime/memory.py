"""The memory that this process may use: the machine's, or less where a cgroup limits it."""

from __future__ import annotations

import os
from pathlib import Path

from allfold_core.machine import MEMORY, Read, bounds

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int:
    """Return the bytes that the process may use: the least of the machine's and its cgroups'.

    Limits of all ancestors count, of cgroups of version 2 and 1. What cannot be read is no limit.

    Args:
        root: of the file system that has ``proc`` and ``sys``.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(each.limit for each in bounds(reader(root), MEMORY))])


def reader(root: Path = _ROOT) -> Read:
    """Return a function that reads the kernel's files, as :mod:`allfold_core.machine` wants it."""

    def read(path: str) -> str:
        try:
            return (root / path.lstrip("/")).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    return read
