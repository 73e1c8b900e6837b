"""The checks of a machine: this one's versions and agent, and the limits of any process."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from allfold._process.settings import socket_path
from allfold._session.agent_socket import connect
from allfold._session.connection import AgentConnection
from allfold._starting.surroundings import are_wanted
from allfold.cli._config.services import strays
from allfold.cli._doctor.findings import HERE, CheckFinding, Json, fail, ok, warn
from allfold.cli._showing import size
from allfold_cluster.job import JobRecord
from allfold_core.errors import AgentUnreachable, AllfoldError, InvalidArgument
from allfold_core.machine import describe

_FEW_FILES = 4096
_FEW_THREADS = 128
_LITTLE_MEMORY = 512 << 20
_NEARLY = 0.8

_MORE_FILES = (
    "raise the limit where the process starts: 'ulimit -n 65536', LimitNOFILE=65536 in systemd, "
    "--ulimit nofile=65536 in Docker"
)
_MORE_THREADS = (
    "raise it: 'ulimit -u', TasksMax= in systemd, --pids-limit in Docker, podPidsLimit of the "
    "kubelet"
)
_MORE_MEMORY = (
    "raise the limit (--memory in Docker, resources.limits.memory in Kubernetes), or use smaller "
    "tensors: the work memory of an agent is as large as the tensors in flight"
)
_ALLOW_MEMFD = (
    "let the process make memfds: the seccomp profile of the container must allow memfd_create, "
    "and its memory limit must leave room"
)
_AGENT_SOCKET = "agent socket"
_GREETING_SECONDS = 3.0
_PACKAGES = ("allfold", "allfold-core", "allfold-agent", "allfold-orchestrator", "numpy", "torch")


def check_machine(jobs: Iterable[JobRecord]) -> Iterator[CheckFinding]:
    """Yield the findings that need no service but the agents of this machine.

    Args:
        jobs: those to look at that have services of their own.
    """
    yield from judge_machine(HERE, describe(_read, _open_files()), _problem_with_memfd())
    yield _versions()
    yield from _misspelt_variables()
    for job in jobs:
        yield from _greeted(job.agent, f"job:{job.job}: ")
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


def _versions() -> CheckFinding:
    found = {name: number for name in _PACKAGES if (number := _version_of(name))}
    words = ", ".join([f"{name} {number}" for name, number in found.items()])
    words = f"{words}, Python {platform.python_version()}"
    ours = {number for name, number in found.items() if name.startswith("allfold")}
    if len(ours) > 1:
        advice = "install the same version of all packages of Allfold, into one environment"
        return fail("versions", HERE, words, advice)
    return ok("versions", HERE, words)


def _misspelt_variables() -> Iterator[CheckFinding]:
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


def _agent_socket(path: str) -> Iterator[CheckFinding]:
    """The socket at which jobs look for the agent of this machine: theirs to use, answering.

    None has to listen there where jobs can start services of their own.
    """
    try:
        starts, found = are_wanted(), connect(path)
    except InvalidArgument as error:
        yield fail("environment", HERE, error.message, "no job starts before that is corrected")
    except AgentUnreachable as error:
        advice = "see 'ls -l' of the socket and of its folder"
        yield fail(_AGENT_SOCKET, HERE, error.message, advice)
    else:
        if not isinstance(found, str):
            found.close()
            yield from _greeted(path)
        elif starts:
            yield _own_services(path)
        else:
            level = fail if os.environ.get("ALLFOLD_SOCKET") else warn
            yield level(_AGENT_SOCKET, HERE, f"no agent listens on {path} ({found})", _start(path))


def _own_services(path: str) -> CheckFinding:
    """Return the finding where nothing runs, and a job starts what it needs."""
    needed = ["allfold-agent"]
    if not os.environ.get("ALLFOLD_ORCHESTRATOR_URL"):
        needed.append("allfold-orchestrator")
    missing = [name for name in needed if not _version_of(name)]
    nothing = f"no agent listens on {path}"
    if missing:
        found = f"{nothing}, and a job cannot start its own: {' and '.join(missing)} not installed"
        return warn(_AGENT_SOCKET, HERE, found, f'pip install "allfold[local]", or {_start(path)}')
    return ok(_AGENT_SOCKET, HERE, f"{nothing}: a job starts its own {' and '.join(needed)}")


def _start(path: str) -> str:
    return (
        f"start one with 'allfold agent --socket {path}', or name another socket with "
        "ALLFOLD_SOCKET; a machine without ranks needs none, nor does 'allfold run' without --agent"
    )


def _greeted(path: str, whose: str = "") -> Iterator[CheckFinding]:
    try:
        connection = AgentConnection(path, _GREETING_SECONDS)
    except AllfoldError as error:
        advice = (
            "see the log of the agent; one that is stopped (SIGSTOP, a debugger) or of another "
            "version does not answer, and has to be started again"
        )
        yield fail(_AGENT_SOCKET, HERE, f"{whose}{error.message}", advice)
        return
    welcome = connection.welcome
    connection.close()
    place = Path(path).stat()
    owner = f"owner uid {place.st_uid}, mode {stat.filemode(place.st_mode)}"
    agent = f"node {welcome.get('node')}, version {welcome.get('version')}"
    yield ok(_AGENT_SOCKET, HERE, f"{whose}{path} ({owner}) leads to {agent}")


def judge_machine(where: str, machine: Json, memfd: str) -> Iterator[CheckFinding]:
    """Yield what the limits of a process mean for Allfold.

    Args:
        machine: as :func:`allfold_core.machine.describe` has it.
        memfd: why no shared memory can be made; "" if it can.
    """
    bad = [*_files(where, machine), *_threads(where, machine), *_memory(where, machine)]
    if memfd:
        found = f"shared memory cannot be made: {memfd}"
        bad.append(fail("shared memory", where, found, _ALLOW_MEMFD))
    yield from bad
    if not bad:
        yield ok("limits", where, _in_words(machine))


def _files(where: str, machine: Json) -> Iterator[CheckFinding]:
    files = machine["open_files"]
    soft, hard, used = files["soft"], files["hard"], files["used"]
    if hard is not None and hard < _FEW_FILES:
        found = f"at most {hard} open files; connections and buffers of tensors are one each"
        yield warn("open files", where, found, _MORE_FILES)
    elif soft is not None and used > _NEARLY * soft:
        yield warn("open files", where, f"{used} of {soft} open files are used", _MORE_FILES)


def _threads(where: str, machine: Json) -> Iterator[CheckFinding]:
    threads, processes = machine["threads"], machine["processes"]
    if threads["limit"] is not None and threads["limit"] - (threads["used"] or 0) < _FEW_THREADS:
        found = f"{threads['used']} of {threads['limit']} threads of the cgroup are used"
        yield warn("threads", where, found, _MORE_THREADS)
    if processes["soft"] is not None and processes["soft"] < _FEW_THREADS:
        found = f"at most {processes['soft']} threads for this user"
        yield warn("threads", where, found, _MORE_THREADS)


def _memory(where: str, machine: Json) -> Iterator[CheckFinding]:
    memory = machine["memory"]
    limit, used, available = memory["limit"], memory["used"], memory["available"]
    if limit is not None and used is not None and limit - used < _LITTLE_MEMORY:
        found = f"{size(used)} of {size(limit)}, the limit of the cgroup, are used"
        yield warn("memory", where, found, _MORE_MEMORY)
    elif available is not None and available < _LITTLE_MEMORY:
        found = f"{size(available)} of {size(memory['total'])} are available"
        yield warn("memory", where, found, "end what else needs memory there, or add some")


def _in_words(machine: Json) -> str:
    files, memory, threads = machine["open_files"], machine["memory"], machine["threads"]
    parts = [f"open files {files['used']} of {_most(files['soft'])}"]
    parts.append(f"memory {size(memory['available'])} available of {size(memory['total'])}")
    if memory["limit"] is not None:
        parts.append(f"cgroup {size(memory['used'])} of {size(memory['limit'])}")
    if threads["limit"] is not None:
        parts.append(f"threads {threads['used']} of {threads['limit']}")
    locked = machine["locked_memory"]["soft"]
    parts.append(f"locked memory {'unlimited' if locked is None else size(locked)}, not needed")
    return ", ".join(parts)


def _most(limit: int | None) -> str:
    return "any number" if limit is None else str(limit)
