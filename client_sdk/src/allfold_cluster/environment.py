"""The machine of a cluster: what its services find in their environment, and free ports."""

from __future__ import annotations

import fcntl
import os
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from allfold_core.errors import InvalidArgument, ServiceError
from allfold_service.credentials import Tokens

SOCKET_PATH_LIMIT = 107
"""Bytes that Linux allows for the path of a Unix socket."""

_NOT_PASSED_ON = ("ALLFOLD_AGENT_ADVERTISE",)
"""Settings of an agent that serves others; local ones advertise where they listen."""
# What a launcher of another job may have left.
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"),
    *("TORCHELASTIC", "PMI_", "OMPI_", "SLURM_"),
)


def require(*modules: str) -> None:
    """Refuse, with the command that helps, where a service is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ServiceError(
            f"not installed on this machine: {' and '.join(missing)}; "
            'install with: pip install "allfold[local]"'
        )


def socket_path(path: Path | str) -> str:
    """``path`` as text, if it is short enough for a Unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise InvalidArgument(
            f"the socket path {path} has {size} bytes, but Unix sockets allow "
            f"{SOCKET_PATH_LIMIT}; set TMPDIR to a shorter folder"
        )
    return str(path)


def service_environment(env: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The services' environment: with a token, and readable logs."""
    ours = {name: value for name, value in env.items() if name not in _NOT_PASSED_ON}
    if token is not None:
        ours["ALLFOLD_TOKEN"] = token
    elif not sent_token(ours):
        ours["ALLFOLD_TOKEN"] = secrets.token_urlsafe(24)
    ours.setdefault("ALLFOLD_LOG_FORMAT", "text")
    return ours


def sent_token(env: Mapping[str, str]) -> str:
    """Return the join token of an environment; empty without one."""
    return Tokens(env.get("ALLFOLD_TOKEN", ""), env.get("ALLFOLD_TOKEN_FILE", "")).sent


def clean_environment(*besides: str) -> dict[str, str]:
    """Return this process's environment, without what a surrounding launcher has set there.

    Args:
        besides: beginnings of further names to leave out.
    """
    foreign = (*_OF_LAUNCHERS, *besides)
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


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
