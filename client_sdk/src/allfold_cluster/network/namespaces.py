"""Network namespaces that are gone when this process is."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from allfold_cluster.signals import completed_first
from allfold_core.errors import ServiceError

_PREFIX = "allfold-net"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SECONDS = 20.0


def ip(*arguments: str) -> None:
    """Run ip(8)."""
    _run("ip", *arguments)


def tc(namespace: str, *arguments: str) -> None:
    """Run tc(8) in a namespace."""
    _run("tc", "-netns", namespace, *arguments)


class Namespaces:
    """One namespace for each node, and one for the switch between them.

    Attributes:
        nodes: the nodes' names.
        switch: the name of the one in between, where the orchestrator is too.
    """

    def __init__(self, nodes: int) -> None:
        """Prepare; nothing is made before ``with``."""
        self.nodes = [f"{_PREFIX}-{os.getpid()}-node{number}" for number in range(nodes)]
        self.switch = f"{_PREFIX}-{os.getpid()}-switch"
        self._made: list[str] = []

    def __enter__(self) -> Self:
        _remove_orphans()
        try:
            for name in (self.switch, *self.nodes):
                self._made.append(name)
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the namespaces; their links go with them."""
        with ExitStack() as ending:  # each of them, even where one cannot be removed
            for name in self._made:
                if (_FOLDER / name).exists():
                    ending.callback(ip, "netns", "delete", name)
            self._made.clear()


@contextmanager
def entered(name: str) -> Iterator[None]:
    """While entered, what this thread opens and starts belongs to the namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        inside = os.open(_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_namespace(inside)
        finally:
            os.close(inside)
        try:
            yield
        finally:
            _set_namespace(before)
    finally:
        os.close(before)


def _set_namespace(fd: int) -> None:
    """``os.setns``, which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a network namespace: {os.strerror(number)}")


def _remove_orphans() -> None:
    """Remove the namespaces of runs that were killed."""
    for path in _FOLDER.glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            with suppress(ServiceError):  # another run may have been faster
                ip("netns", "delete", path.name)


def _run(*command: str) -> None:
    try:
        with completed_first():  # so that what is made is known, and removed
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(str(error)) from error
    if done.returncode:
        raise ServiceError(f"{' '.join(command)}: {done.stderr.strip()}")
