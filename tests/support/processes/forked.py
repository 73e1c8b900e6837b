"""Starts Python modules as children: forks of one process, where that makes no difference."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from allfold_cluster.processes import Child, stop_all

_ANSWER_SECONDS = 60.0
_ANSWER_BYTES = 4096
# Programs read these when they begin, and not libraries when they are imported.
_READ_LATER = ("ALLFOLD_", "CUDA_", "FAKE_CUDA_", "PYTHONPATH", "PYTEST_CURRENT_TEST")
# One costs the imports of one process, and memory: with GPUs of a fake driver, and without.
_MOST_SERVERS = 2


class ForkServer:
    """The process that forks, as long as this one lives."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.network = _network()
        self._one_request = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._child = Child(
                "fork server",
                [sys.executable, "-m", "tests.support.processes.fork_server"],
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=theirs.fileno(),
            )

    def ask(self, request: object, *streams: int) -> int:
        """Return the answer to one request."""
        with self._one_request:  # tests have threads that start processes
            socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
            return int(json.loads(self._channel.recv(_ANSWER_BYTES)))

    def close(self) -> None:
        """End it, and all that it has forked."""
        self._channel.close()
        stop_all([self._child])


class _Process:
    """As much of ``subprocess.Popen`` as a ``Child`` uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._server = server

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._server.ask({"reap": self.pid})
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Forked(Child):
    """A child that the fork server made."""

    def __init__(
        self,
        server: ForkServer,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int,
        output: int,
        errors: int | None = None,
    ) -> None:
        self.name = name
        request = {
            "command": list(command),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
        }
        errors = output if errors is None else errors
        process = _Process(server, server.ask(request, stdin, output, errors))
        self._process = cast("subprocess.Popen[bytes]", process)
        self.stdout = self.stderr = None
        self._pidfd = os.pidfd_open(self.pid)


_servers: list[ForkServer] = []
_is_test = False


def enable() -> None:
    """Fork from now on. Benchmarks do not: they measure how long a process takes to start."""
    global _is_test
    _is_test = True


def start_module(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: int,
    errors: int | None = None,
    stdin: int | None = None,
) -> Child:
    """Start ``python -m COMMAND`` as a child: a fork where that makes no difference.

    Args:
        name: of the child.
        command: the module and its arguments.
        environment: all of it.
        output: the descriptor of its standard output.
        errors: that of its standard errors; they go where its output goes without it.
        stdin: the descriptor of its standard input; nothing is there to read without it.
    """
    if (server := _server_for(environment)) is None:
        whole = [sys.executable, "-m", *command]
        given = subprocess.DEVNULL if stdin is None else stdin
        said = output if errors is None else errors
        return Child(name, whole, env=environment, stdin=given, stdout=output, stderr=said)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        first = nothing if stdin is None else stdin
        return Forked(server, name, command, environment, stdin=first, output=output, errors=errors)
    finally:
        os.close(nothing)


def _server_for(environment: Mapping[str, str]) -> ForkServer | None:
    """The fork server in which libraries found these variables, unless there are enough others."""
    if not _is_test:
        return None
    fitting = {k: v for k, v in environment.items() if not k.startswith(_READ_LATER)}
    for server in _servers:
        if server.environment == fitting and server.network == _network():
            return server
    # A child dies with the thread that started it. With more than one of OpenMP, torch has threads
    # once it is imported, and these would not survive a fork.
    lasts = threading.current_thread() is threading.main_thread()
    if len(_servers) == _MOST_SERVERS or not lasts or fitting.get("OMP_NUM_THREADS") != "1":
        return None
    _servers.append(ForkServer(fitting))
    atexit.register(_servers[-1].close)
    return _servers[-1]


def _network() -> str:
    """The namespace of this thread's network: it may have entered another one."""
    return str(Path("/proc/thread-self/ns/net").readlink())
