"""The judgement of a life in which ranks join and leave, from their logs alone: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chaos.judge import (
    DIFFERENT,
    MISSING,
    Finding,
    Life,
    by_op,
    name,
    of_rank,
    outcome,
)
from chaos.records import RankLog, Record

_NOT_COLLECTIVE = ("init", "boundary", "send", "recv")


def judge_churn(life: Life) -> list[Finding]:
    """Return every promise that was broken. A newcomer's ops count from its first one."""
    found = [*life.findings]
    for log in life.survivors:
        found += of_rank(life, log)
        found += _of_numbers(life, log)
    for number, logs in _openings(life.survivors):
        found += _of_opening(replace(life, name=f"{life.name}, opening {number}", logs=logs))
    return found


def _openings(logs: Sequence[RankLog]) -> Iterator[tuple[int, list[RankLog]]]:
    """Yield each opening of the group with the logs of its ranks.

    Redis may have lost their numbers, and begun with the first one again: ranks of one number that
    did not play at the same time, or one after the other without a gap, are of different openings.
    """
    found: dict[int, list[RankLog]] = defaultdict(list)
    for log in sorted(logs, key=lambda log: log.records[0].called if log.records else 0.0):
        if log.records:
            found[log.records[-1].opening].append(log)
    for number, ranks in found.items():
        together, until = [ranks[0]], ranks[0].records[-1].ended
        for log in ranks[1:]:
            if log.records[0].called > until:
                yield number, together
                together = []
            together.append(log)
            until = max(until, log.records[-1].ended)
        yield number, together


def _of_numbers(life: Life, log: RankLog) -> Iterator[Finding]:
    numbers = [record.number for record in log.records if record.kind not in _NOT_COLLECTIVE]
    missing = set(range(min(numbers, default=0), max(numbers, default=-1))) - set(numbers)
    if missing:
        yield Finding(MISSING, f"{life.name}, {log}: it did not call {sorted(missing)}")


def _of_opening(life: Life) -> Iterator[Finding]:
    for (_, _, kind), records in sorted(by_op(life.survivors).items()):
        if kind in _NOT_COLLECTIVE:
            continue
        where = f"{life.name}, {name(next(iter(records.values())))}"
        outcomes = {seat: outcome(record) for seat, record in records.items()}
        if len(set(outcomes.values())) > 1:
            told = ", ".join(f"{seat}: {each}" for seat, each in sorted(outcomes.items()))
            yield Finding(DIFFERENT, f"{where}: {told}")
        yield from _of_ranks(where, records)


def _of_ranks(where: str, records: dict[int, Record]) -> Iterator[Finding]:
    """Judge the numbers of the ranks: each has one of its own, below the size of the group."""
    ranks = {seat: record.rank for seat, record in sorted(records.items())}
    if len(set(ranks.values())) < len(ranks) or any(
        record.rank >= record.world for record in records.values()
    ):
        yield Finding(DIFFERENT, f"{where}: seats have the ranks {ranks}")
