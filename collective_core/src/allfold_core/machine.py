"""The limits and the memory of a process, from the kernel's files. Pure: somebody else reads them.

Agents say them of themselves and ``allfold doctor`` of its own machine, in one form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

Read = Callable[[str], str]
"""Returns the text of a file by its absolute path, "" where it cannot be read."""

_MOUNTED = "/sys/fs/cgroup"
# "No limit" of version 1 is the largest number of whole pages.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Controller:
    """A limit of a cgroup: the files of limit and use, in version 2 and in version 1."""

    name: str
    files: tuple[str, str]
    files_v1: tuple[str, str]


MEMORY = Controller(
    "memory",
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
THREADS = Controller("pids", ("pids.max", "pids.current"), ("pids.max", "pids.current"))


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit of a cgroup, and how much of it is used; ``None`` where that cannot be read."""

    limit: int
    used: int | None


def describe(read: Read, open_files: int) -> dict[str, Any]:
    """Return the limits of this process and the use of each; ``None``: no limit, or not known.

    Args:
        open_files: how many descriptors the process has: a folder has to be listed for that.
    """
    memory, threads = narrowest(read, MEMORY), narrowest(read, THREADS)
    return {
        "open_files": {**_resource(read, "Max open files"), "used": open_files},
        "locked_memory": _resource(read, "Max locked memory"),
        "processes": _resource(read, "Max processes"),
        "threads": {
            "limit": threads.limit if threads else None,
            "used": threads.used if threads else None,
        },
        "memory": {
            "total": _kibibytes(read, "MemTotal"),
            "available": _kibibytes(read, "MemAvailable"),
            "limit": memory.limit if memory else None,
            "used": memory.used if memory else None,
        },
    }


def narrowest(read: Read, controller: Controller) -> Bound | None:
    """Return the bound of which the least is left, of this process's cgroups; ``None``: none."""
    found = bounds(read, controller)
    return min(found, key=lambda each: each.limit - (each.used or 0), default=None)


def bounds(read: Read, controller: Controller) -> Iterator[Bound]:
    """Yield the bounds of the process's cgroups and their ancestors, of versions 2 and 1.

    In a container without a namespace of its own for cgroups the path is the host's, and what is
    mounted is the container's own cgroup: then only the mount's root is there to read.
    """
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", "-"][:3]
        if not path.startswith("/"):
            continue  # not a line of ours
        if not controllers:
            yield from _along(read, _MOUNTED, path, controller.files)
        elif controller.name in controllers.split(","):
            yield from _along(read, f"{_MOUNTED}/{controller.name}", path, controller.files_v1)


def _along(read: Read, mounted: str, path: str, files: tuple[str, str]) -> Iterator[Bound]:
    relative = PurePosixPath(path.lstrip("/"))
    for each in (relative, *relative.parents):
        limit, used = (read(str(PurePosixPath(mounted) / each / name)).strip() for name in files)
        if limit.isdecimal() and int(limit) < _NO_LIMIT:  # "max" is none
            yield Bound(int(limit), int(used) if used.isdecimal() else None)


def _resource(read: Read, title: str) -> dict[str, int | None]:
    """A line of ``/proc/self/limits``: title, soft limit, hard limit, unit."""
    found = re.search(rf"^{title} +(\w+) +(\w+)", read("/proc/self/limits"), re.MULTILINE)
    soft, hard = found.groups() if found else ("", "")
    return {
        "soft": int(soft) if soft.isdecimal() else None,
        "hard": int(hard) if hard.isdecimal() else None,
    }


def _kibibytes(read: Read, name: str) -> int | None:
    found = re.search(rf"^{name}: +(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
