"""A port that is free now, for a process that must listen on the same one after a restart.

Not one of those that the kernel gives to outgoing connections, as port 0 would: among the
thousands of connections of a test run one would take it before the process listens, or while it
is dead.
"""

from __future__ import annotations

import random
import socket

# Linux begins with 32768 for outgoing connections, others with 49152.
_PORTS = range(15_000, 32_000)
_random = random.SystemRandom()  # test runs beside this one choose others


def free_port() -> int:
    """Of this machine's loopback; nobody listens on it yet."""
    return next(port for port in _random.sample(_PORTS, len(_PORTS)) if _is_free(port))


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
