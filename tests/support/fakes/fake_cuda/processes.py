"""Processes that use a driver: they run programs of one module, one after the other.

Each program is a function of the module, whose arguments and result JSON can hold. What it keeps
for the next one, it keeps in the module. The module ends with ``serve(globals())`` as its main
program.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).parents[4]
_SECONDS = 60.0
_NOTE = b"descriptor"


class Process:
    """A process that runs programs of a module.

    Args:
        module: with the programs.
        settings: variables of the environment, beside those of this process.
        files: descriptors that it inherits.
    """

    def __init__(self, module: str, settings: dict[str, str], files: tuple[int, ...] = ()) -> None:
        self._channel, theirs = socket.socketpair()
        self._hands, their_hands = socket.socketpair()  # for descriptors
        self._channel.settimeout(_SECONDS)
        self._hands.settimeout(_SECONDS)
        self._lines = self._channel.makefile("rwb")
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        with theirs, their_hands:
            number = their_hands.fileno()
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, str(number)],
                env=os.environ | settings | {"PYTHONPATH": path},
                stdin=theirs.fileno(),
                pass_fds=(*files, number),
            )

    def run(self, program: Callable[..., Any], **arguments: Any) -> Any:
        """Its result; ``EOFError`` where the process ends instead."""
        self._lines.write(json.dumps([program.__name__, arguments]).encode() + b"\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise EOFError(program.__name__)
        return json.loads(line)

    def hand(self, descriptor: int) -> None:
        """Hand over a descriptor, which a program gets from :func:`receive`."""
        socket.send_fds(self._hands, [_NOTE], [descriptor])

    def hand_on(self, other: Process) -> None:
        """Hand a descriptor that a program has given to :func:`send` to another process."""
        descriptor = _receive(self._hands)
        other.hand(descriptor)
        os.close(descriptor)

    def end(self) -> int:
        """Let it end; its exit status."""
        self._close()
        try:
            return self._child.wait(_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it, whatever it does."""
        self._child.kill()
        self._child.wait(_SECONDS)

    def _close(self) -> None:
        self._lines.close()
        self._channel.close()
        self._hands.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        if self._child.poll() is None:
            self.end()
        self._close()


def _receive(hands: socket.socket) -> int:
    _, (descriptor,), *_ = socket.recv_fds(hands, len(_NOTE), 1)
    return descriptor


# What follows is for programs.

_own_hands: list[socket.socket] = []


def serve(programs: Mapping[str, Any]) -> None:
    """Answer calls, each a line of JSON, until they end."""
    _own_hands.append(socket.socket(fileno=int(sys.argv[1])))
    with _own_hands[0], socket.socket(fileno=0) as channel, channel.makefile("rwb") as stream:
        for line in stream:
            program, arguments = json.loads(line)
            result = programs[program](**arguments)
            stream.write(json.dumps(result).encode() + b"\n")
            stream.flush()


def send(descriptor: int) -> None:
    """Give a descriptor to whoever runs the programs, and close it."""
    socket.send_fds(_own_hands[0], [_NOTE], [descriptor])
    os.close(descriptor)


def receive() -> int:
    """A descriptor that was handed over, to be closed by the caller."""
    return _receive(_own_hands[0])
