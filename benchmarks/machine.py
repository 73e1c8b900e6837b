"""The machine of a run: a figure without it says nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import mpi
from benchmarks.children import ROOT
from benchmarks.plan import OPENMPI

_PACKAGES = ("allfold", "torch", "numpy", "mpi4py", "mpich", "deepspeed", "commux")
_MACHINE_ID = Path("/etc/machine-id")
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def environment(arguments: list[str]) -> dict[str, Any]:
    """The machine, the versions, the commit and the command."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": arguments,
        "commit": _commit(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in _PACKAGES} | {OPENMPI: mpi.version()},
        "cpu": _field("/proc/cpuinfo", "model name"),
        "machine": _machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "load": os.getloadavg()[0],
        "priority": priority(),
        "kernel": platform.release().partition("-")[0],
        "congestion_control": _CONGESTION_CONTROL.read_text().strip(),
    }


def _machine() -> str | None:
    """Tell machines of one kind apart, by a digest of this one's id: that itself is secret."""
    if not _MACHINE_ID.exists():
        return None
    return hashlib.sha256(b"allfold " + _MACHINE_ID.read_bytes().strip()).hexdigest()[:8]


def priority() -> str | None:
    """Return how the scheduler prefers this process or puts it last; ``None``: it is ordinary.

    All processes of a run inherit it.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return "not the ordinary scheduling policy (chrt)"
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return f"nice {nice}" if nice else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> str | None:
    found = _field("/proc/meminfo", "MemTotal")
    return f"{int(found.split()[0]) * 1024 / 1e9:.0f} GB" if found else None


def _field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _commit() -> str | None:
    """Of the working tree, marked ``+`` where it has changes; ``None`` where git is not."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (FileNotFoundError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
