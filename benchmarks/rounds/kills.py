"""Ranks and agents that are killed in a round and come back, and what that costs the others."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.children import python
from benchmarks.errors import BenchmarkFailed
from benchmarks.figures import percentile
from benchmarks.goodput.accounts import Log, Phase, Stalls
from benchmarks.goodput.training import Training
from benchmarks.rounds.kills_rank import Orders, Outcome, outcomes_of, read_outcomes
from benchmarks.rounds.options import WORLD, Options

HEAD = (
    *("what", "faults", "undisturbed p50 s", "lost p50 s", "lost p99 s", "to reach"),
    *("join p50 s", "rounds", "wrong", "different", "hangs, failures"),
)
_GROUP = "kills"
_NUMEL = 1 << 20
_COMPUTE_SECONDS = 0.02
_UNDISTURBED_SECONDS = 3.0
# After all are in again: so a fault hits any moment of a round.
_BETWEEN_SECONDS = 0.25


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """Kill ranks, and agents with their ranks, in turn."""
    kills: list[tuple[float, int]] = []
    stuck: BenchmarkFailed | None = None
    with Training(WORLD, _command) as training:
        training.await_all()
        began = time.monotonic()
        training.watch(_UNDISTURBED_SECONDS)
        undisturbed = time.monotonic()
        try:
            for number in range(options.faults):
                training.watch(_BETWEEN_SECONDS * (1 + number % 7 / 7))
                node = number % WORLD
                kills.append((time.monotonic(), node))
                training.kill(training.nodes[node], with_agent=number // WORLD % 2 == 1)
                training.await_all()
        except BenchmarkFailed as error:
            stuck = error
        logs, files = training.logs(), training.files()
        found = [read_outcomes(outcomes_of(file)) for file in files]
    ideal = Phase.of(logs, began, undisturbed).p50
    lost = [seconds_lost(logs, files, at, node, ideal) for at, node in kills]
    joins = [steps * ideal for steps in Stalls.of(logs, undisturbed, ideal).joins]
    yield {
        "what": f"SIGKILL of a rank or an agent, {WORLD} nodes, {_NUMEL * 4 >> 20} MiB",
        "faults": len(kills),
        "undisturbed p50 s": f"{ideal:.3f}",
        "lost p50 s": f"{percentile(lost, 50):.3f}",
        "lost p99 s": f"{percentile(lost, 99):.3f}",
        "to reach": "<= 2 s, 0, 0, 0",
        "join p50 s": f"{statistics.median(joins):.3f}" if joins else "",
        "rounds": len({each.number for outcomes in found for each in outcomes}),
        "wrong": sum(step.wrong for log in logs for step in log),
        "different": different(found),
        "hangs, failures": int(stuck is not None),
    }
    if stuck is not None:
        raise stuck


def _command(agent: str, seat: int, log: Path) -> list[str]:
    orders = Orders(_GROUP, agent, seat, WORLD, _COMPUTE_SECONDS, _NUMEL, str(log))
    return python("benchmarks.rounds.kills_rank", orders.pack())


def seconds_lost(
    logs: Sequence[Log], files: Sequence[Path], at: float, node: int, ideal: float
) -> float:
    """Return how much longer than ideal the round took that was hit, for the slowest survivor.

    Args:
        logs, files: of all ranks; the name of a file begins with that of its node.
        at: when somebody on ``node`` was killed.
    """
    gaps = [
        late.ended - early.ended
        for log, file in zip(logs, files, strict=True)
        if not file.name.startswith(f"node{node}.")
        for early, late in pairwise(log)
        if early.ended <= at < late.ended
    ]
    # A hang: until the end of all logs, which no survivor has outlived.
    end = max(log[-1].ended for log in logs if log)
    return max(max(gaps, default=end - at) - ideal, 0.0)


def different(ranks: Iterable[Sequence[Outcome]]) -> int:
    """Return in how many rounds ranks have seen other participants, weights or bits."""
    seen: dict[int, set[Outcome]] = defaultdict(set)
    for outcomes in ranks:
        for each in outcomes:
            seen[each.number].add(each)
    return sum(len(each) > 1 for each in seen.values())
