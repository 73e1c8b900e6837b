"""A healthy training on a crowded machine: whatever is reported is a false alarm."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from allfold.cli._processes import Child, stop_all, wait_for
from benchmarks.diagnosis.cluster import Cluster
from benchmarks.errors import BenchmarkFailed

_BURN = "while True: pass"


def watch_healthy(cluster: Cluster, seconds: float, burners: int) -> list[dict[str, Any]]:
    """Train for some time beside busy processes; return the incidents that were reported."""
    cluster.start_job()
    busy = [
        Child(f"burner {number}", [sys.executable, "-c", _BURN], env=os.environ)
        for number in range(burners)
    ]
    try:
        known = {each["id"] for each in cluster.incidents()}
        wait_for(cluster.watched, seconds)
        if not cluster.is_whole:
            raise BenchmarkFailed(
                f"a rank of the healthy training ended\n{cluster.services.log_tails()}"
            )
        return [each for each in cluster.incidents() if each["id"] not in known]
    finally:
        for each in busy:
            each.signal(signal.SIGKILL)
        stop_all(busy)
