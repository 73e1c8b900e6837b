"""Looking at the processes of ranks from outside: the kernel's accounts, and their Python stacks.

Nothing of it needs the process to do anything, so it works on one that is stopped, or that keeps
the interpreter lock.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from allfold_core.diagnosis.processes import ProcessLook, PythonThread, StackFrame, Stacks

log = logging.getLogger(__name__)

_STACK_SECONDS = 1.0
_NANOSECOND = 1e-9


def look_at(pid: int, folder: Path = Path("/proc")) -> ProcessLook:
    """Return what the kernel says of a process.

    The state is ``X`` where there is no such process, and ``""`` where it must not be seen.
    """
    proc = folder / str(pid)
    try:
        state = (proc / "stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ProcessLook(monotonic(), "X")
    except OSError:  # /proc is mounted with hidepid
        return ProcessLook(monotonic(), "")
    return ProcessLook(monotonic(), state, *_cpu_seconds(proc), _waits_in(proc))


def _cpu_seconds(proc: Path) -> tuple[float, float]:
    """Return the seconds for which the main thread has had a CPU, and was ready without one.

    Some kernels do not count them (gVisor's, Linux without ``CONFIG_SCHED_INFO``): they are 0 then.
    """
    try:
        ran, queued = (proc / "schedstat").read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) * _NANOSECOND, int(queued) * _NANOSECOND


def _waits_in(proc: Path) -> str:
    try:
        name = (proc / "wchan").read_text()
    except OSError:  # only for those who may trace it
        return ""
    return "" if name == "0" else name


def stacks_of(pid: int) -> Stacks:
    """Return the Python threads of a process; none where they cannot be read.

    It takes py-spy, and the right to read the memory of the process: the same user and container,
    or SYS_PTRACE.
    """
    command = _py_spy()
    if command is None:
        return ()
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            timeout=_STACK_SECONDS,
            check=True,
        )
        return [_thread(each) for each in json.loads(done.stdout)]
    except subprocess.CalledProcessError as error:
        log.debug("py-spy cannot read process %d: %s", pid, error.stderr.decode(errors="replace"))
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        log.debug("no stack of process %d: %r", pid, error)
    return ()


@cache
def _py_spy() -> str | None:
    """Return the path of py-spy: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _thread(data: dict[str, Any]) -> PythonThread:
    return PythonThread(
        is_main=data["os_thread_id"] == data["pid"],
        name=str(data["thread_name"] or ""),
        is_active=bool(data["active"]),
        has_lock=bool(data["owns_gil"]),
        frames=tuple(
            StackFrame(str(each["name"]), str(each["filename"]), int(each["line"]))
            for each in data["frames"]
        ),
    )
