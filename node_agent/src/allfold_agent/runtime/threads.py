"""Threads: started where a system may have none left, and a pool of them for folds and copies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, active_count

import numpy as np

from allfold_core.errors import ServiceError


def ignore_overflows() -> None:
    """Have NumPy say nothing of sums that overflow, in this thread from now on: it may fold."""
    np.seterr(all="ignore")


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


log = logging.getLogger(__name__)
Action = Callable[[], None]


class WorkerPool:
    """``count`` threads that run actions in the order of their submission.

    Not a ``ThreadPoolExecutor``: its ``submit`` makes a future and takes locks, some 10 us where
    this one takes 0.1 us.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._actions: SimpleQueue[Action | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"allfold-worker-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, action: Action) -> None:
        """Queue an action. One that raises is logged."""
        self._actions.put(action)

    def close(self) -> None:
        """End the threads after the actions that are queued."""
        for _ in self._threads:
            self._actions.put(None)

    def _run(self) -> None:
        ignore_overflows()
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:
                log.exception("a worker's action failed")
            del action  # it may hold the memory of ranks, and the next one may be long in coming
