"""Forks the processes of tests, with the libraries that they need imported already.

An agent, or a rank that uses torch, spends two seconds of a core on imports otherwise. Nothing of
Allfold runs in this process and it has one thread, so that what it forks is like a process that
has just begun. ``forked.py`` starts it and asks it; one message is one request, one its answer.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What agents, orchestrators and ranks import as they start, and torch's parts as these come.
_IMPORTED = (
    "allfold",
    "allfold_agent.service",
    "allfold_orchestrator.http.app",
    "allfold_service.server",
    "torch.distributed",
    "torch.nn.parallel",
)
_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES = 1 << 20
_STREAMS = 3

Program = Callable[[], object]


def serve(channel: socket.socket) -> Program | None:
    """Answer requests until the other end is closed; in a forked process, what it is to run."""
    while True:
        message, streams, _, _ = socket.recv_fds(channel, _REQUEST_BYTES, _STREAMS)
        if not message:
            return None
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            leads, reports = os.pipe()
            answer = os.fork()
            if answer == 0:
                channel.close()
                os.close(leads)
                return _forked(request, streams, reports)
            for fd in (reports, *streams):
                os.close(fd)
            # Who asked may signal its process group at once.
            os.read(leads, 1)
            os.close(leads)
        channel.send(json.dumps(answer).encode())


def _forked(request: dict[str, Any], streams: list[int], reports: int) -> Program:
    """Make this process what a shell would have started; the program itself is left to do."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.close(reports)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in (request["folder"], *paths) if path and path not in sys.path]
    module, *sys.argv[1:] = request["command"]

    def program() -> None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return program


def main() -> Program | None:
    """Import what processes need and serve on the socket that standard input is."""
    for name in _IMPORTED:
        importlib.import_module(name)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "threads do not survive a fork"
    # Otherwise each collection in a forked process would copy all that is shared.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as channel:
        return serve(channel)


if __name__ == "__main__":
    # At the bottom of the stack: its exceptions end the process as they would end a script.
    if (program := main()) is not None:
        program()
