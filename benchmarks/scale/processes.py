"""A Redis and an orchestrator of our own on free ports, and what they cost in CPU time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 30.0
END_SECONDS = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Service:
    """A process that was started here and ends here."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far; resolution 10 ms."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @property
    def peak_bytes(self) -> int:
        """The largest resident set so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[Service]:
    """Debian's ``redis-server``, in memory only."""
    port = _free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "no", "--dir", str(folder)]
    with _started(command, folder / "redis.log", {}) as process:
        _await(lambda: _answers(port), process, folder / "redis.log")
        yield Service(process, f"127.0.0.1:{port}")


@contextmanager
def orchestrator(folder: Path, redis: str, name: str = "0", **settings: str) -> Iterator[Service]:
    """One replica on the Redis at ``redis``; ``settings`` are environment variables."""
    ready, log = folder / f"ready-{name}", folder / f"orchestrator-{name}.log"
    command = [sys.executable, "-m", "allfold_orchestrator", "--listen", "127.0.0.1:0"]
    command += ["--redis-url", f"redis://{redis}/0", "--ready-file", str(ready)]
    with _started(command, log, settings) as process:
        _await(ready.exists, process, log)
        yield Service(process, ready.read_text())


@contextmanager
def _started(
    command: list[str], log: Path, settings: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **settings}
        )
    try:
        yield process
    finally:
        Service(process, "").end()


def _await(condition: object, process: subprocess.Popen[bytes], log: Path) -> None:
    assert callable(condition)
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"it did not come up:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
