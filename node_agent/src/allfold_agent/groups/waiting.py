"""The ops of a group that are not done, and whom each waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allfold_agent.execution.op import Op
from allfold_agent.groups.lane_records import PostedOp

if TYPE_CHECKING:
    from allfold_agent.groups.group import Group


@dataclass(frozen=True, slots=True)
class WaitingOp:
    """An op that ranks of this node have called, and that is not done.

    Attributes:
        what: the call, for people.
        missing: the local ranks that have not called it.
        silent: the nodes whose data have not come, once all local ranks have called.
        since: when the first local rank called it (monotonic).
    """

    seq: int
    what: str
    strategy: str
    missing: tuple[int, ...]
    silent: tuple[str, ...]
    since: float


def waiting_ops(group: Group) -> list[WaitingOp]:
    """Return the ops in flight, in their order. From any thread."""
    ops = [_of_agent(op) for op in list(group.table.in_flight.values()) if op.calls]
    ops += [_of_lane(op) for op in group.lanes.records.in_flight()]
    return sorted(ops, key=lambda each: each.seq)


def _of_agent(op: Op) -> WaitingOp:
    silent = [node for node, each in list(op.receivers.items()) if not each.all_received()]
    return WaitingOp(
        op.seq,
        op.fingerprint.describe(),
        op.strategy,
        tuple(rank for rank in op.ranks if rank not in op.arrivals),
        tuple(silent),
        op.first_arrival,
    )


def _of_lane(op: PostedOp) -> WaitingOp:
    seen = op.record
    return WaitingOp(seen.seq, seen.what, seen.strategy, seen.missing, op.silent, seen.start)
