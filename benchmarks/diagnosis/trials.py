"""One fault after the other, and what is reported of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from allfold_cluster.processes import wait_for
from benchmarks.diagnosis.faults import FAULTS, LASTS_SECONDS
from benchmarks.diagnosis.scoring import Trial
from benchmarks.diagnosis.training import Training

_LOOK_AGAIN_SECONDS = 0.05
# Of a training that goes on undisturbed, so that what is usual is known.
_WARM_UP_SECONDS = 4.0
_BETWEEN_SECONDS = 2.0


def run_trials(
    training: Training,
    kinds: Sequence[str],
    count: int,
    seed: int,
    on_trial: Callable[[Trial], None],
) -> list[Trial]:
    """Inject so many faults, the kinds in turn, the culprits at random."""
    chance, trials = random.Random(seed), []
    for number in range(count):
        if not training.is_whole:
            training.start_job()
            _let_train(training, _WARM_UP_SECONDS)
        trial = _try(training, kinds[number % len(kinds)], chance)
        trials.append(trial)
        on_trial(trial)
    return trials


def _try(training: Training, kind: str, chance: random.Random) -> Trial:
    known = {each["id"] for each in training.incidents()}
    fault = FAULTS[kind](training, chance)
    began = time.monotonic()
    expected = fault.inject()
    delay = None
    try:
        while time.monotonic() - began < LASTS_SECONDS:
            new = _new(training, known)
            if delay is None and any(expected.matches(each) for each in new):
                delay = time.monotonic() - began
            wait_for([], _LOOK_AGAIN_SECONDS)
    finally:
        reports = _new(training, known)
        fault.lift()
    if fault.ends_job or not training.is_whole:
        training.end_job()
    training.await_quiet()
    if training.is_whole:
        _let_train(training, _BETWEEN_SECONDS)
    return Trial(kind, expected, reports, delay)


def _new(training: Training, known: set[str]) -> list[dict[str, Any]]:
    """Return the incidents that were not known before the fault, in the order of their finding."""
    found = [each for each in training.incidents() if each["id"] not in known]
    return sorted(found, key=lambda each: each["seen"])


def _let_train(training: Training, seconds: float) -> None:
    until = time.monotonic() + seconds
    while training.is_whole and (left := until - time.monotonic()) > 0:
        wait_for(training.watched, left)
