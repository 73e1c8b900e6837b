"""A Redis and an orchestrator of our own on free ports, and what they cost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from allfold.cli._processes import Child, stop_all, wait_for
from benchmarks.children import environment, python
from benchmarks.errors import BenchmarkFailed
from benchmarks.redis_server import RedisServer
from benchmarks.usage import cpu_seconds, peak_bytes

_START_SECONDS = 30.0
_END_SECONDS = 10.0
_LOOK_AGAIN_SECONDS = 0.02
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Service:
    """A process that was started here and ends here."""

    pid: int
    address: str

    @property
    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        return cpu_seconds([self.pid])

    @property
    def peak_bytes(self) -> int:
        """The largest resident set so far."""
        return peak_bytes(self.pid)


@contextmanager
def redis_server(folder: Path) -> Iterator[Service]:
    """The system's ``redis-server``, in memory only."""
    if shutil.which("redis-server") is None:
        raise BenchmarkFailed("the part orchestrator needs a redis-server on the PATH")
    server = RedisServer(folder)
    try:
        server.start()
    except RuntimeError as error:
        raise BenchmarkFailed(str(error)) from error
    try:
        yield Service(server.pid, f"127.0.0.1:{server.port}")
    finally:
        server.stop()


@contextmanager
def orchestrator(folder: Path, redis: str, name: str = "0", **settings: str) -> Iterator[Service]:
    """One replica on the Redis at ``redis``; ``settings`` are environment variables."""
    ready, log = folder / f"ready-{name}", folder / f"orchestrator-{name}.log"
    options = ["--listen", "127.0.0.1:0", "--redis-url", f"redis://{redis}/0"]
    command = python("allfold_orchestrator", *options, "--ready-file", str(ready))
    with log.open("ab") as output:
        env = environment() | settings
        child = Child(f"orchestrator {name}", command, env=env, stdout=output, stderr=output)
    try:
        _await_file(ready, child, log)
        yield Service(child.pid, ready.read_text())
    finally:
        stop_all([child], grace=_END_SECONDS)


def _await_file(file: Path, child: Child, log: Path) -> None:
    """Look for the file until it is there, the child ends, or time is up."""
    deadline = time.monotonic() + _START_SECONDS
    while not file.exists():
        wait_for([child], _LOOK_AGAIN_SECONDS)
        if child.ended or time.monotonic() > deadline:
            text = log.read_text(errors="replace")[-_TAIL_CHARACTERS:]
            raise BenchmarkFailed(f"{child.name} did not come up:\n{text}")
