"""A port that is free now, for a process that must listen on the same one after a restart.

Not one of those that the kernel gives to outgoing connections, as port 0 would: among
thousands of connections one would take it before the process listens, or while it
is dead. And none that was handed out of late, here or in a process beside this one: a process
takes seconds to start before it listens.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import time
from pathlib import Path

# Linux begins with 32768 for outgoing connections, others with 49152.
_PORTS = range(15_000, 32_000)
_RESERVED_SECONDS = 600.0
_random = random.SystemRandom()


def free_port() -> int:
    """Of this machine's loopback; nobody listens on it yet."""
    folder = Path(tempfile.gettempdir(), f"allfold-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in _PORTS:
            port = _random.choice(_PORTS)
            reserved = folder / str(port)
            if not _is_recent(reserved) and _is_free(port):
                reserved.touch()
                return port
    raise RuntimeError(f"no port of {_PORTS} is free")


def _is_recent(file: Path) -> bool:
    try:
        return time.time() - file.stat().st_mtime < _RESERVED_SECONDS
    except FileNotFoundError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_address() -> str:
    """As ``host:port``."""
    return f"127.0.0.1:{free_port()}"
