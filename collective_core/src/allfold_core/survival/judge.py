"""The verdict on an op by the calls in the reports; the errors of ops that cannot go on. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from allfold_core.diagnosis.stragglers import Hindrances
from allfold_core.errors import (
    AllfoldError,
    BelowMinWorld,
    PeerLost,
    RootLost,
    WorldChanged,
    from_json,
)
from allfold_core.operations import Fingerprint
from allfold_core.survival.records import Epoch, Seat
from allfold_core.survival.reports import Call, Doubt, Reason, Report, may_shrink
from allfold_core.verdict import OpEvidence, counted, judge_deadline, judge_mismatch, name_ranks

NODE_LOST = "was lost"


def packed(error: AllfoldError) -> str:
    """The error as JSON."""
    return json.dumps(error.to_dict(), sort_keys=True)


def unpacked(text: str) -> AllfoldError:
    """The inverse of :func:`packed`."""
    return from_json(text)


def describe_change(
    group: str, before: Epoch, gone: Mapping[Seat, str], seats: Sequence[Seat]
) -> PeerLost:
    """Return the error that describes how an epoch differs from the one before.

    Args:
        before: the epoch before.
        gone: the seats that were lost or given up, each with how that is known.
        seats: the seats of the new epoch.
    """
    newcomers = [seat for seat in seats if seat.session not in before.sessions]
    details = {"group": group, **_details(before, gone)}
    told = []
    if gone:
        left = len(before.seats) - len(gone)
        told.append(
            f"has lost {_name_lost(before, gone)}; {left} of {len(before.seats)} ranks "
            f"{_are(left)} left"
        )
    if newcomers:
        details["joined"] = [len(seats) - len(newcomers) + each for each in range(len(newcomers))]
        size = counted(len(seats), "rank")
        told.append(f"has taken in {_name_newcomers(seats, newcomers)}; it has {size}")
    text = f"group '{group}' {', and '.join(told)}"
    return WorldChanged(text, **details) if newcomers else PeerLost(text, **details)


def cannot_go_on(
    group: str, seq: int, call: Call | None, epoch: Epoch, gone: Mapping[Seat, str], left: int
) -> PeerLost:
    """The error of an op that has no result and cannot be run again.

    Args:
        call: of any rank; ``None`` if none has called it.
        epoch: in which it was run.
        gone: the seats of that epoch that were lost since.
        left: how many ranks the group still has.
    """
    what = f"op {seq} of group '{group}'" + (f", {call.fingerprint.describe()}," if call else "")
    lost = _name_lost(epoch, gone)
    details = {"seq": seq, "group": group, **_details(epoch, gone)}
    roots = {seat.session for seat in gone}
    if call is not None and call.root in roots and may_shrink(call.kind):
        return RootLost(f"{what} cannot be done without its root, {lost}", **details)
    if call is not None and not may_shrink(call.kind):
        return WorldChanged(
            f"{what} cannot be done without {lost}: its tensors are made for "
            f"{counted(len(epoch.seats), 'rank')}",
            **details,
        )
    whom = f"without {lost}" if lost else "by those who are left"
    return PeerLost(f"{what} cannot be done {whom}", left=left, **details)


def root_lost_before(group: str, seq: int, call: Call, change: AllfoldError) -> RootLost:
    """Return the error of an op that was called with a root that had been lost before.

    Args:
        change: the error of the newest change of the members.
    """
    return RootLost(
        f"op {seq} of group '{group}', {call.fingerprint.describe()}, has lost its root: "
        f"{change.message}",
        **{**change.details, "seq": seq, "group": group},
    )


def below_min_world(group: str, seq: int, left: int, min_world: int, change: str) -> BelowMinWorld:
    """Return the error of an op that needs more ranks than are left.

    Args:
        change: the packed error of the newest change of the members; empty if there was none.
    """
    why = f": {unpacked(change).message}" if change else ""
    return BelowMinWorld(
        f"op {seq} of group '{group}' cannot be done, as {counted(left, 'rank')} {_are(left)} left "
        f"and min_world is {min_world}{why}",
        seq=seq,
        group=group,
        left=left,
        min_world=min_world,
    )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _details(epoch: Epoch, gone: Mapping[Seat, str]) -> dict[str, Any]:
    return {
        "ranks": _ranks(epoch, gone),
        "nodes": sorted({seat.node for seat in gone}),
        "lost": {seat.session: how for seat, how in gone.items()},
    }


def _ranks(epoch: Epoch, gone: Mapping[Seat, str]) -> list[int]:
    return [rank for rank, seat in enumerate(epoch.seats) if seat in gone]


def _name_lost(epoch: Epoch, gone: Mapping[Seat, str]) -> str:
    """``rank 3 on node b, which left the group, and ranks 4, 5 on node c, which ...``."""
    cases: dict[tuple[str, str], list[int]] = {}
    for rank in _ranks(epoch, gone):
        seat = epoch.seats[rank]
        cases.setdefault((seat.node, gone[seat]), []).append(rank)
    named = [
        f"{name_ranks(ranks)} on node {node}, which {how}" for (node, how), ranks in cases.items()
    ]
    return ", and ".join(named)


def _name_newcomers(seats: Sequence[Seat], newcomers: Sequence[Seat]) -> str:
    """``rank 3 on node b, and ranks 4, 5 on node c``."""
    by_node: dict[str, list[int]] = {}
    for seat in newcomers:
        by_node.setdefault(seat.node, []).append(seats.index(seat))
    return ", and ".join(f"{name_ranks(ranks)} on node {node}" for node, ranks in by_node.items())


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

    Calls that do not fit together are an error whether anybody doubts the op or not; but as long as
    nobody does, all ranks are waited for, since it takes most of them to tell who is odd. With its
    first two arguments bound, this is a ``Judge`` of :mod:`allfold_core.survival.decision`.

    Args:
        group: its name.
        hindrances: what is known of why ranks are late.
        epoch: in which the op is run; ranks are named by their numbers in it.
    """
    evidence = gather_evidence(seq, epoch, reports)
    nodes = tuple(seat.node for seat in epoch.seats)
    if doubt is None and len(evidence.arrivals) < len(nodes):
        return None  # the first frames of calls that differ bring a doubt, and the others are heard
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


def gather_evidence(seq: int, epoch: Epoch, reports: Mapping[str, Report]) -> OpEvidence:
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
    return OpEvidence(seq, arrivals, last_seq, silent, frozenset(held))


def _as_in(numbers: Mapping[str, int], call: Call) -> Fingerprint:
    """The fingerprint of a call, with the number that its root has in the epoch."""
    if not call.root:
        return call.fingerprint
    return replace(call.fingerprint, root=numbers.get(call.root, GONE))
