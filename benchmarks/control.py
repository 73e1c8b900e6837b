"""Messages between the conductor, which is this command, and the ranks.

JSON over a Unix socket that keeps them apart. Nothing of it is on the path of a measured op,
and who waits here sleeps: no waiting rank takes time from another one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from typing import Any, Protocol, Self

_LARGEST = 1 << 20
_CONNECT_SECONDS = 30.0

Message = dict[str, Any]


class Line:
    """One end of the line between the conductor and a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, path: str, seconds: float) -> Self:
        """A rank's end."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(seconds)
        connection.connect(path)
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode())

    def receive(self, seconds: float) -> Message:
        """The next message.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: nothing came in time.
        """
        self._socket.settimeout(seconds)
        data = self._socket.recv(_LARGEST)
        if not data:
            raise EOFError("the other side is gone")
        message: Message = json.loads(data)
        return message

    def close(self) -> None:
        self._socket.close()


class Rank(Protocol):
    """A rank that the conductor sends its commands to."""

    def obey(self, message: Message) -> Message:
        """Do what a message says; the answer."""

    def leave(self) -> None:
        """Leave what has been joined."""


def serve(control: str, number: int, rank: Rank, seconds: float) -> None:
    """Serve the conductor until it says ``leave``.

    The process ends when the conductor is gone or is silent for ``seconds``; and when something
    fails, whatever it is, which the conductor is told.
    """
    line = Line.connect(control, _CONNECT_SECONDS)
    line.send({"rank": number, "pid": os.getpid()})
    try:
        while (message := line.receive(seconds)) != {"do": "leave"}:
            line.send(_answer(rank, message, line))
        rank.leave()
        line.send({})
    except (EOFError, ConnectionError):
        sys.exit(f"rank {number}: the benchmark has ended without a word")


def _answer(rank: Rank, message: Message, line: Line) -> Message:
    try:
        return rank.obey(message)
    except Exception:  # noqa: BLE001  (the conductor shows it)
        line.send({"error": traceback.format_exc()})
        sys.exit(1)


def sleep_until(moment: float) -> None:
    """Sleep until a moment of the clock ``time.monotonic``, which all processes share."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
