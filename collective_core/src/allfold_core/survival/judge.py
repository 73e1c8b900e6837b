"""The judge of a round: the verdict on one op by the calls in the reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from allfold_core.diagnosis.hindrances import Hindrances
from allfold_core.errors import AllfoldError
from allfold_core.operations import Fingerprint
from allfold_core.survival.losses import unpacked
from allfold_core.survival.records import Epoch
from allfold_core.survival.reports import Call, Doubt, Reason, Report
from allfold_core.verdict import Evidence, judge_deadline, judge_mismatch

GONE = -1
"""The number of a root that is not in the epoch."""


def judge_calls(
    group: str,
    hindrances: Hindrances,
    seq: int,
    epoch: Epoch,
    reports: Mapping[str, Report],
    doubt: Doubt | None,
) -> AllfoldError | None:
    """Return the error of an op that cannot go on; ``None`` where it may.

    Calls that do not fit together are an error whether anybody doubts the op or not. With its first
    two arguments bound, this is a ``Judge`` of :mod:`allfold_core.survival.decision`.

    Args:
        group: its name.
        hindrances: what is known of why ranks are late.
        epoch: in which the op is run; ranks are named by their numbers in it.
    """
    evidence = gather_evidence(seq, epoch, reports)
    nodes = tuple(seat.node for seat in epoch.seats)
    mismatch = judge_mismatch(group, nodes, evidence)
    if mismatch is not None or doubt is None:
        return mismatch
    if doubt.reason is Reason.DEADLINE:
        evidence = replace(
            evidence, hindered=hindrances.of_ranks(), links=tuple(hindrances.of_links())
        )
        return judge_deadline(group, nodes, evidence, doubt.waited)
    if doubt.reason is Reason.FAILED:
        return unpacked(doubt.error)
    return None  # of a mismatch or a stale view the calls themselves say all


def gather_evidence(seq: int, epoch: Epoch, reports: Mapping[str, Report]) -> Evidence:
    """Return what the reports say of one op, by the ranks of an epoch."""
    numbers = {seat.session: rank for rank, seat in enumerate(epoch.seats)}
    arrivals: dict[int, Fingerprint] = {}
    last_seq: dict[int, int] = {}
    held: set[int] = set()
    for report in reports.values():
        calls = report.ops[seq].calls if seq in report.ops else {}
        for session in numbers.keys() & calls.keys():
            arrivals[numbers[session]] = _as_in(numbers, calls[session])
        for session in numbers.keys() & report.called.keys():
            last_seq[numbers[session]] = report.called[session]
        for session in numbers.keys() & report.deferred.keys():
            if report.deferred[session] <= seq:
                held.add(numbers[session])
    silent = tuple(sorted(epoch.nodes - reports.keys()))
    return Evidence(seq, arrivals, last_seq, silent, frozenset(held))


def _as_in(numbers: Mapping[str, int], call: Call) -> Fingerprint:
    """The fingerprint of a call, with the number that its root has in the epoch."""
    if not call.root:
        return call.fingerprint
    return replace(call.fingerprint, root=numbers.get(call.root, GONE))
