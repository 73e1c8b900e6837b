"""The descriptors of a process: how many it has, and none at all."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def descriptors(pid: int) -> int:
    """The number of descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Let nothing be opened or accepted by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
