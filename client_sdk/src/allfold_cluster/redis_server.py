"""A private redis-server, with a port and a folder of its own."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from allfold_cluster.environment import free_port
from allfold_cluster.processes import Child, stop_all, wait_for
from allfold_core.errors import ServiceError

START_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 0.01
_TAIL_CHARACTERS = 2000


class RedisServer:
    """Starts, stops and starts again on the same port.

    Args:
        is_durable: it keeps each write on the disk; else nothing outlives a stop.
        options: further ones of redis-server.

    Attributes:
        port: of this machine's loopback.
    """

    def __init__(
        self, folder: Path, *, is_durable: bool = False, options: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        self._options = options
        self._appends = ["yes", "--appendfsync", "always"] if is_durable else ["no"]
        self._log = folder / "redis.log"
        self._child: Child | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """For ``redis_url`` of a cluster."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the server, while it runs."""
        assert self._child is not None, "the server was not started"
        return self._child.pid

    def start(self) -> None:
        """Return once it answers.

        Raises:
            ServiceError: it ended, or did not answer in time; the text has its last words.
        """
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--dir", str(self._folder), "--appendonly", *self._appends]
        command += self._options
        with self._log.open("ab") as log:
            self._child = Child("redis-server", command, env=os.environ, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            wait_for([self._child], _LOOK_AGAIN_SECONDS)
            if self._child.ended or time.monotonic() > deadline:
                self.stop()
                text = self._log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
                raise ServiceError(f"redis-server did not come up:\n{text}")

    def stop(self) -> None:
        """Kills it; what it knew is gone, unless it is durable."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            stop_all([self._child])
            self._child = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False
