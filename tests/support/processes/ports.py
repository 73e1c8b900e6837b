"""A port that is free now, for a process that must listen on the same one after a restart."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Of this machine's loopback; nobody has it yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_address() -> str:
    """As ``host:port``."""
    return f"127.0.0.1:{free_port()}"
