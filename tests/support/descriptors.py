"""A process without descriptors."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager


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
