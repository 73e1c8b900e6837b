"""The limits of a process: descriptors, threads, memory. Pure; of agents and of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from allfold.cli._doctor.findings import Finding, Json, fail, ok, warn
from allfold.cli._units import size

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


def judge_machine(where: str, machine: Json, memfd: str) -> Iterator[Finding]:
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


def _files(where: str, machine: Json) -> Iterator[Finding]:
    files = machine["open_files"]
    soft, hard, used = files["soft"], files["hard"], files["used"]
    if hard is not None and hard < _FEW_FILES:
        found = f"at most {hard} open files; connections and buffers of tensors are one each"
        yield warn("open files", where, found, _MORE_FILES)
    elif soft is not None and used > _NEARLY * soft:
        yield warn("open files", where, f"{used} of {soft} open files are used", _MORE_FILES)


def _threads(where: str, machine: Json) -> Iterator[Finding]:
    threads, processes = machine["threads"], machine["processes"]
    if threads["limit"] is not None and threads["limit"] - (threads["used"] or 0) < _FEW_THREADS:
        found = f"{threads['used']} of {threads['limit']} threads of the cgroup are used"
        yield warn("threads", where, found, _MORE_THREADS)
    if processes["soft"] is not None and processes["soft"] < _FEW_THREADS:
        found = f"at most {processes['soft']} threads for this user"
        yield warn("threads", where, found, _MORE_THREADS)


def _memory(where: str, machine: Json) -> Iterator[Finding]:
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
