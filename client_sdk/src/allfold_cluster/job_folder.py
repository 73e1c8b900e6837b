"""The folder of a user's jobs on one machine: claimed by one process at a time, gone when empty.

It is beside the default socket of an agent, of mode 0700.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from allfold_cluster.environment import SOCKET_PATH_LIMIT
from allfold_core.errors import AgentUnreachable
from allfold_service.addresses import default_socket

LOCK = "lock"
_CLAIM_TRIES = 100
# Longer than it takes to start a supervisor, which one does who has claimed the folder.
_CLAIM_SECONDS = 45.0
_LOOK_AGAIN_SECONDS = 0.005
# For records and logs: without that much, services fail one after the other and cannot say why.
_ROOM_BYTES = 256 * 1024
_RANDOM_CHARACTERS = 8


def jobs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's jobs, beside the default socket of an agent."""
    return Path(default_socket(environment)).parent / "jobs"


def files_of_jobs(pattern: str) -> list[Path]:
    """Return what is in the folder of jobs, which may go while one looks."""
    with suppress(FileNotFoundError):
        return sorted(jobs_folder().glob(pattern))
    return []


@contextmanager
def claiming(folder: Path) -> Iterator[None]:
    """Be alone in the folder of this user's jobs; it is there only while there is one."""
    with _locked(folder):
        try:
            yield
        finally:
            if all(each.name == LOCK for each in folder.iterdir()):
                (folder / LOCK).unlink()
                folder.rmdir()
                with suppress(OSError):  # an agent's socket may be in it
                    folder.parent.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / LOCK
    for tries_left in reversed(range(_CLAIM_TRIES)):
        try:
            folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for each in (folder.parent, folder):
                each.mkdir(mode=0o700, exist_ok=True)
                _check_is_ours(each)
            lock = path.open("a")
        except FileNotFoundError:  # removed meanwhile, by who was the last
            if tries_left:
                continue
            raise
        with lock:
            _lock(lock.fileno())
            if _is_still_at(path, lock.fileno()):
                yield
                return
    raise OSError(f"others have removed it {_CLAIM_TRIES} times")


def _lock(descriptor: int) -> None:
    """Lock a file, for which nothing but to look again has a deadline."""
    deadline = monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > deadline:
                reason = f"another process of this user has locked it for {_CLAIM_SECONDS:g} s"
                raise OSError(reason) from None
            sleep(_LOOK_AGAIN_SECONDS)
        else:
            return


def _is_still_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _check_is_ours(folder: Path) -> None:
    """Refuse a folder in which another user could put something."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise AgentUnreachable(f"{folder} is no folder; remove it, or set XDG_RUNTIME_DIR")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise AgentUnreachable(
            f"{folder}, where the services of jobs have their sockets, belongs to uid "
            f"{found.st_uid} with mode {stat.filemode(found.st_mode)}, and this process runs as "
            f"uid {os.geteuid()}: it must be this user's, and nobody else may write to it. Remove "
            "it, or set XDG_RUNTIME_DIR to a folder of yours."
        )


def check_length(folder: Path, job: str, node: str) -> None:
    """Refuse a folder with too long a path for the agent's socket, which has the longest one."""
    random = "x" * _RANDOM_CHARACTERS
    size = len(os.fsencode(folder / f"{job}-{random}" / f"{node}.sock"))
    if size > SOCKET_PATH_LIMIT:
        raise AgentUnreachable(
            f"the folder {folder} for the services of this job has too long a path: sockets in it "
            f"would have {size} bytes, but Unix sockets allow {SOCKET_PATH_LIMIT}. Set "
            "XDG_RUNTIME_DIR or TMPDIR to a shorter folder."
        )


def check_room(folder: Path) -> None:
    """Refuse a folder that is full."""
    file = folder / "room"
    with file.open("wb") as room:
        os.posix_fallocate(room.fileno(), 0, _ROOM_BYTES)
    file.unlink()


def is_locked(path: Path) -> bool:
    try:
        with path.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
