"""The memory that this process may use: the machine's, or less where a cgroup limits it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int:
    """Return the bytes that the process may use: the least of the machine's and its cgroups'.

    Limits of all ancestors count, of cgroups of version 2 and 1. What cannot be read is no limit.

    Args:
        root: of the file system that has ``proc`` and ``sys``.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", "-"][:3]
        if not path.startswith("/"):
            continue  # not a line of ours
        if not controllers:
            yield from _limits(mounted, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits(mounted / "memory", path, "memory.limit_in_bytes")


def _limits(mounted: Path, path: str, name: str) -> Iterator[int]:
    """The limits of a cgroup and its ancestors.

    In a container without a namespace of its own for cgroups the path is the host's, and what is
    mounted is the container's own cgroup: then only the mount's root is there to read.
    """
    relative = PurePosixPath(path.lstrip("/"))
    for each in (relative, *relative.parents):
        limit = _read(mounted / each / name).strip()
        if limit.isdecimal():  # "max" is none
            yield int(limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
