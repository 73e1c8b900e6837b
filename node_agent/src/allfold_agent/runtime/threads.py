"""Starting threads where a system may have none left."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread, active_count

from allfold_core.errors import ServiceError


def start_thread(target: Callable[[], None], name: str) -> Thread:
    """Start a daemon thread.

    Raises:
        ServiceError: the system has no thread left for this process.
    """
    thread = Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ServiceError(
            f"the node agent cannot start the thread '{name}' ({error}): it runs {active_count()} "
            "threads; raise its limit of processes (ulimit -u, or pids in a container), or run "
            "fewer groups on this node"
        ) from error
    return thread
