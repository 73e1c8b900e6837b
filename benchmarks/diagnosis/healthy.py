"""A healthy training on a crowded machine: whatever is reported is a false alarm."""

from __future__ import annotations

from typing import Any

from allfold_cluster.processes import wait_for
from benchmarks.diagnosis.burners import end_burners, start_burners
from benchmarks.diagnosis.training import Training
from benchmarks.errors import BenchmarkFailed


def watch_healthy(training: Training, seconds: float, burners: int) -> list[dict[str, Any]]:
    """Train for some time beside busy processes; return the incidents that were reported."""
    known = {each["id"] for each in training.incidents()}
    training.start_job()
    busy = start_burners(burners)
    try:
        wait_for(training.watched, seconds)
        if not training.is_whole:
            raise BenchmarkFailed(
                f"a rank of the healthy training ended\n{training.cluster.log_tails()}"
            )
        return [each for each in training.incidents() if each["id"] not in known]
    finally:
        end_burners(busy)
