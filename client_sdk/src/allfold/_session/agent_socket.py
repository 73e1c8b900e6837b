"""Connecting to the socket of the node agent, and why that may be impossible."""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from allfold_core.errors import AgentUnreachable

log = logging.getLogger("allfold")

_RETRY_SECONDS = 0.05
_OR_ELSE = (
    "start the script with 'allfold run', or name another socket with ALLFOLD_SOCKET or agent="
)


def connect(path: str) -> socket.socket | str:
    """Try once to connect; where no agent listens yet, return the reason.

    Raises:
        AgentUnreachable: waiting would not help: another user's, no socket, or no possible path.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # An agent that is stopped while its queue is full would let a blocking connect wait.
    connected.setblocking(False)
    try:
        connected.connect(path)
    except OSError as error:
        connected.close()
        if (refusal := _refusal(path, error)) is not None:
            raise AgentUnreachable(refusal) from error
        return str(error.strerror)
    connected.setblocking(True)
    return connected


def await_agent(
    path: str,
    seconds: float,
    *,
    began: float | None = None,
    warn: Callable[[str], None] = log.warning,
    pause: Callable[[float], object] = sleep,
    or_else: str = _OR_ELSE,
) -> socket.socket:
    """Connect, waiting for an agent that is still starting.

    Args:
        began: from when the seconds count (monotonic); by default from now on.
        warn: told once that there is a wait.
        pause: sleeps: nothing can be awaited on a socket that does not exist yet.
        or_else: what else than to start an agent the user may do.

    Raises:
        AgentUnreachable: no agent listens in time, or waiting would not help.
    """
    began = monotonic() if began is None else began
    found = connect(path)
    if not isinstance(found, str):
        return found
    warn(f"no node agent listens on {path} ({found}); waiting up to {seconds:g} s for it")
    while isinstance(found, str):
        if monotonic() > began + seconds:
            raise AgentUnreachable(
                f"no node agent listens on {path} ({found}; tried for {seconds:g} s). Start one "
                f"with 'allfold agent --socket {shlex.quote(path)}', {or_else}."
            )
        pause(_RETRY_SECONDS)
        found = connect(path)
    log.info("a node agent listens on %s, after %.1f s", path, monotonic() - began)
    return found


def _refusal(path: str, error: OSError) -> str | None:
    """Return the message for a failure that waiting cannot mend; ``None`` for any other."""
    if isinstance(error, PermissionError):
        return _forbidden(path)
    if error.errno is None:  # Python's own check of the path
        return f"{path} cannot be the path of a node agent's socket: {error}; choose a shorter one"
    if isinstance(error, NotADirectoryError) or _is_something_else(path):
        return (
            f"{path} is not the socket of a node agent; set ALLFOLD_SOCKET, --agent or agent= to "
            "the path that 'allfold agent' was given with --socket, or that its log shows as ranks"
        )
    return None


def _is_something_else(path: str) -> bool:
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)  # noqa: PTH116 - Path.stat is no faster
    except OSError:
        return False


def _forbidden(path: str) -> str:
    """Return a message that names the owner of the socket and this process's user."""
    obstacle, owner, mode = _obstacle(Path(path))
    me = _user(os.geteuid())
    if owner == os.geteuid():
        return (
            f"this process ({me}) may not use the node agent's socket {path}: {obstacle} has mode "
            f"{stat.filemode(mode)}; allow its owner to read, write and enter it"
        )
    return (
        f"the node agent's socket {path} is another user's: {obstacle} belongs to {_user(owner)}, "
        f"and this process runs as {me}. Run it as that user or as root, or start an agent of your "
        "own with 'allfold agent --socket' and a path of your own, and set ALLFOLD_SOCKET to it."
    )


def _obstacle(path: Path) -> tuple[Path, int, int]:
    """The socket or, where a folder hides it, the folder: its path, owner and mode."""
    for place in (path, *path.parents):
        try:
            found = place.stat()
        except OSError:
            continue
        return place, found.st_uid, found.st_mode
    return path, os.geteuid(), 0


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:  # containers often have no entry for theirs
        return f"uid {number}"
