"""One fault after the other, and what is reported of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from allfold.cli._processes import wait_for
from benchmarks.diagnosis.cluster import Cluster
from benchmarks.diagnosis.faults import FAULTS, LASTS_SECONDS
from benchmarks.diagnosis.scoring import Trial

_LOOK_AGAIN_SECONDS = 0.05
# Of a training that goes on undisturbed, so that what is usual is known.
_WARM_UP_SECONDS = 4.0
_BETWEEN_SECONDS = 2.0


def run_trials(
    cluster: Cluster, kinds: Sequence[str], count: int, seed: int, on_trial: Callable[[Trial], None]
) -> list[Trial]:
    """Inject so many faults, the kinds in turn, the culprits at random."""
    chance, trials = random.Random(seed), []
    for number in range(count):
        if not cluster.is_whole:
            cluster.start_job()
            _let_train(cluster, _WARM_UP_SECONDS)
        trial = _try(cluster, kinds[number % len(kinds)], chance)
        trials.append(trial)
        on_trial(trial)
    return trials


def _try(cluster: Cluster, kind: str, chance: random.Random) -> Trial:
    known = {each["id"] for each in cluster.incidents()}
    fault = FAULTS[kind](cluster, chance)
    began = time.monotonic()
    expected = fault.inject()
    delay = None
    try:
        while time.monotonic() - began < LASTS_SECONDS:
            new = _new(cluster, known)
            if delay is None and any(expected.matches(each) for each in new):
                delay = time.monotonic() - began
            wait_for([], _LOOK_AGAIN_SECONDS)
    finally:
        reports = _new(cluster, known)
        fault.lift()
    if fault.ends_job or not cluster.is_whole:
        cluster.end_job()
    cluster.await_quiet()
    if cluster.is_whole:
        _let_train(cluster, _BETWEEN_SECONDS)
    return Trial(kind, expected, reports, delay)


def _new(cluster: Cluster, known: set[str]) -> list[dict[str, Any]]:
    """Return the incidents that were not known before the fault, in the order of their finding."""
    found = [each for each in cluster.incidents() if each["id"] not in known]
    return sorted(found, key=lambda each: each["seen"])


def _let_train(cluster: Cluster, seconds: float) -> None:
    until = time.monotonic() + seconds
    while cluster.is_whole and (left := until - time.monotonic()) > 0:
        wait_for(cluster.watched, left)
