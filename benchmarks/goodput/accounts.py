"""The steps that ranks have logged, and what they add up to; pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import percentile


@dataclass(frozen=True)
class Step:
    """One attempt of a rank at a step.

    Attributes:
        number: of the step in the training; one that is done again has the same.
        began, ended: seconds of the machine's monotonic clock.
        counts: it was committed; else it is done again.
        wrong: results and states that were not the right ones.
        world: ranks over which its batch was split.
    """

    number: int
    began: float
    ended: float
    counts: bool
    wrong: int
    world: int

    def pack(self) -> str:
        return " ".join(str(float(value)) for value in astuple(self))

    @classmethod
    def unpack(cls, line: str) -> Self:
        number, began, ended, counts, wrong, world = map(float, line.split())
        return cls(int(number), began, ended, bool(counts), int(wrong), int(world))


Log = Sequence[Step]


def read(file: Path) -> list[Step]:
    """Return the steps of a rank; its last line may be cut off."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [Step.unpack(line) for line in lines if line.endswith("\n")]


@dataclass(frozen=True)
class Phase:
    """A part of a run: what the group has done between two moments.

    Attributes:
        seconds: from the one to the other.
        steps: how many were committed, each at the time of its slowest rank.
        redone: attempts that did not count.
        wrong: results and states that were not the right ones, over all ranks.
        p50, p99, mean: seconds from one commit of the group to the next.
    """

    seconds: float
    steps: int
    redone: int
    wrong: int
    p50: float
    p99: float
    mean: float

    @classmethod
    def of(cls, logs: Sequence[Log], start: float, stop: float) -> Self:
        within = [[step for step in log if start < step.ended <= stop] for log in logs]
        commits = sorted(_commits(logs).values())
        times = [time for time in commits if start < time <= stop]
        before = [time for time in commits if time <= start]
        # The first one begins in the phase before.
        ends = [*before[-1:], *times]
        gaps = [late - early for early, late in pairwise(ends)]
        if not gaps:
            raise BenchmarkFailed(f"no step was done in {stop - start:.1f} s")
        return cls(
            stop - start,
            len(times),
            _redone(within),
            sum(step.wrong for log in within for step in log),
            statistics.median(gaps),
            percentile(gaps, 99),
            statistics.fmean(gaps),
        )


def goodput(ideal: Phase, disturbed: Phase) -> float:
    """Return the share of the disturbed time in which steps that count would have been done."""
    return disturbed.steps * ideal.mean / disturbed.seconds


def _commits(logs: Iterable[Log]) -> dict[int, float]:
    """Return when the slowest rank had committed each step."""
    found: dict[int, float] = {}
    for log in logs:
        for step in log:
            if step.counts:
                found[step.number] = max(step.ended, found.get(step.number, 0.0))
    return found


def _redone(logs: Iterable[Log]) -> int:
    """Count the attempts of the group that did not count, each once however many ranks it had."""
    most: dict[int, int] = defaultdict(int)
    for log in logs:
        own: dict[int, int] = defaultdict(int)
        for step in log:
            own[step.number] += not step.counts
        for number, attempts in own.items():
            most[number] = max(most[number], attempts)
    return sum(most.values())


@dataclass(frozen=True)
class Stalls:
    """The delays of the slowest survivor's next commit after a change, in steps.

    Attributes:
        kills: where the step has fewer ranks than the one before, for each such step.
        joins: where it has more.
    """

    kills: list[float]
    joins: list[float]

    @classmethod
    def of(cls, logs: Sequence[Log], start: float, ideal: float) -> Self:
        """From the logs of all ranks after ``start``, with steps of ``ideal`` seconds."""
        kills: dict[int, float] = defaultdict(float)
        joins: dict[int, float] = defaultdict(float)
        for log in logs:
            counted = [step for step in log if step.counts and step.ended > start]
            for before, after in pairwise(counted):
                if before.world != after.world:
                    found = kills if after.world < before.world else joins
                    stall = (after.ended - before.ended) / ideal - 1
                    found[after.number] = max(found[after.number], stall)
        return cls(list(kills.values()), list(joins.values()))
