"""The errors of ops that cannot go on with the ranks that are left, written once, by the leader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from allfold_core.errors import (
    AllfoldError,
    BelowMinWorld,
    PeerLost,
    RootLost,
    WorldChanged,
    from_json,
)
from allfold_core.survival.records import Epoch, Seat
from allfold_core.survival.reports import Call, may_shrink
from allfold_core.verdict import counted, name_ranks

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
