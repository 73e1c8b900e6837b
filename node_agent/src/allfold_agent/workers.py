"""A pool of threads for folds and copies: torch releases the GIL, so they really overlap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

log = logging.getLogger(__name__)
Job = Callable[[], None]


class WorkerPool:
    """``count`` threads that run jobs in the order of their submission."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"allfold-worker-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. A job handles its own errors; one that does not is logged, never lost."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads after the jobs that are queued."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a worker's job failed")
            del job  # it may hold the memory of ranks, and the next one may be long in coming
