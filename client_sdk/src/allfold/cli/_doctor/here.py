"""The checks of this machine, which need no service: limits, versions, the agent's socket."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from allfold._agent_socket import connect
from allfold._connection import Connection
from allfold._settings import socket_path
from allfold.cli._config.strays import strays
from allfold.cli._doctor.findings import HERE, Finding, fail, ok, warn
from allfold.cli._doctor.limits import judge_machine
from allfold_core.errors import AgentUnreachable, AllfoldError
from allfold_core.machine import describe

_GREETING_SECONDS = 3.0
_PACKAGES = ("allfold", "allfold-core", "allfold-agent", "allfold-orchestrator", "numpy", "torch")


def check_machine() -> Iterator[Finding]:
    """Yield the findings that need no service."""
    yield from judge_machine(HERE, describe(_read, _open_files()), _problem_with_memfd())
    yield _versions()
    yield from _misspelt_variables()
    yield from _agent_socket(socket_path())


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _problem_with_memfd() -> str:
    """Make memory as ranks share it with their agent; return why that fails, "" if it works."""
    try:
        descriptor = os.memfd_create("allfold-doctor")
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error)
    return ""


def _versions() -> Finding:
    found = {name: number for name in _PACKAGES if (number := _version_of(name))}
    words = ", ".join([f"{name} {number}" for name, number in found.items()])
    words = f"{words}, Python {platform.python_version()}"
    ours = {number for name, number in found.items() if name.startswith("allfold")}
    if len(ours) > 1:
        advice = "install the same version of all packages of Allfold, into one environment"
        return fail("versions", HERE, words, advice)
    return ok("versions", HERE, words)


def _misspelt_variables() -> Iterator[Finding]:
    """Variables that nobody reads, and that are much like one that somebody does."""
    for name, meant in strays(os.environ).items():
        if meant:
            advice = f"did you mean {meant}? 'allfold config' lists all settings"
            yield warn("environment", HERE, f"nobody reads {name}", advice)


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _agent_socket(path: str) -> Iterator[Finding]:
    """The socket of the agent of this machine: there, ours to use, answering."""
    check = "agent socket"
    named = bool(os.environ.get("ALLFOLD_SOCKET"))
    start = (
        f"start one with 'allfold agent --socket {path}', or name another socket with "
        "ALLFOLD_SOCKET; a machine without ranks needs none, nor does 'allfold run' without --agent"
    )
    try:
        found = connect(path)
    except AgentUnreachable as error:
        yield fail(check, HERE, error.message, "see 'ls -l' of the socket and of its folder")
        return
    if isinstance(found, str):
        level = fail if named else warn
        yield level(check, HERE, f"no agent listens on {path} ({found})", start)
        return
    found.close()
    yield from _greeted(path, check)


def _greeted(path: str, check: str) -> Iterator[Finding]:
    try:
        connection = Connection(path, _GREETING_SECONDS)
    except AllfoldError as error:
        advice = (
            "see the log of the agent; one that is stopped (SIGSTOP, a debugger) or of another "
            "version does not answer, and has to be started again"
        )
        yield fail(check, HERE, error.message, advice)
        return
    welcome = connection.welcome
    connection.close()
    place = Path(path).stat()
    owner = f"owner uid {place.st_uid}, mode {stat.filemode(place.st_mode)}"
    agent = f"node {welcome.get('node')}, version {welcome.get('version')}"
    yield ok(check, HERE, f"{path} ({owner}) leads to {agent}")
