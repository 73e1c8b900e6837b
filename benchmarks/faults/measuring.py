"""Fault after fault to one contestant, and the time until all survivors go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Protocol

from benchmarks.figures import percentile
from chaos.injector import Done
from chaos.records import RankLog
from chaos.report import recovery

_GAP_SECONDS = (0.1, 0.4)
_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class Sample:
    """One fault.

    Attributes:
        outcome: seconds until every survivor had an error, or a result without the lost.
        recovered: seconds until every survivor had finished the next op; ``None`` if none did.
        resident: bytes of the victim, which the kernel frees before it closes its connections.
    """

    outcome: float | None
    recovered: float | None
    resident: int


class Contestant(Protocol):
    """A library with its processes. In a life, ranks do ops until :meth:`end`."""

    name: str

    def start(self, seed: int, /) -> None:
        """Begin a life; returns when every rank has finished an op."""

    def can_lose(self) -> bool:
        """Tell if enough are left for another fault."""

    def fault(self, draw: float) -> Done:
        """Take somebody away."""

    def logs(self) -> list[RankLog]:
        """Return what the ranks that are left have noted by now."""

    def end(self) -> None:
        """End the life."""


def samples(contestant: Contestant, faults: int, patience: float, seed: int) -> Iterator[Sample]:
    """Yield a sample per fault; a life ends with a fault that is not recovered from."""
    random, taken = Random(seed), 0
    for number in count():
        contestant.start(seed + number)
        try:
            while taken < faults and contestant.can_lose():
                # A fault must not always meet the same phase of an op.
                time.sleep(random.uniform(*_GAP_SECONDS))
                sample = _sample(contestant, contestant.fault(random.random()), patience)
                taken += 1
                yield sample
                if sample.recovered is None:
                    break
        finally:
            contestant.end()
        if taken >= faults:
            return


def _sample(contestant: Contestant, done: Done, patience: float) -> Sample:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        logs = contestant.logs()
        if (found := recovery(done, logs)) is not None:
            return Sample(_outcome(done, logs), found, done.resident)
        time.sleep(_LOOK_AGAIN_SECONDS)
    return Sample(_outcome(done, contestant.logs()), None, done.resident)


def _outcome(done: Done, logs: Sequence[RankLog]) -> float | None:
    """Return when the slowest survivor had its first outcome after a fault."""
    firsts = [
        min((record.ended for record in log.records if record.ended > done.at), default=None)
        for log in logs
    ]
    ended = [first for first in firsts if first is not None]
    return max(ended) - done.at if ended and len(ended) == len(firsts) else None


@dataclass(frozen=True)
class Row:
    """One line of the table; ``None`` where nothing was measured.

    Attributes:
        note: why there are no figures, or what they are of.
        load: of the machine in the minute before they were there.
    """

    what: str
    library: str
    shape: str
    target: str = ""
    faults: int = 0
    recovered: float | None = None
    p50: float | None = None
    p99: float | None = None
    mean: float | None = None
    max: float | None = None
    outcome_p50: float | None = None
    resident: int | None = None
    note: str = ""
    load: float | None = None


def row_of(what: str, library: str, shape: str, target: str, found: Sequence[Sample]) -> Row:
    """Return the statistics of samples."""
    times = [each.recovered for each in found if each.recovered is not None]
    outcomes = [each.outcome for each in found if each.outcome is not None]
    return Row(
        what,
        library,
        shape,
        target,
        len(found),
        len(times) / len(found) if found else None,
        **statistics_of(times),
        outcome_p50=statistics.median(outcomes) if outcomes else None,
        resident=max((each.resident for each in found), default=None),
    )


def statistics_of(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the columns of a row that are statistics; none of nothing."""
    if not seconds:
        return {}
    return {
        "p50": statistics.median(seconds),
        "p99": percentile(seconds, 99),
        "mean": statistics.fmean(seconds),
        "max": max(seconds),
    }


def await_all(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Look until the condition holds.

    Raises:
        TimeoutError: it did not in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(_LOOK_AGAIN_SECONDS)
