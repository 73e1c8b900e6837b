"""The flight recorder: one record per op, of those that are over and of those in flight.

Of the ops that ranks do by themselves, in the short lane, it has a sample: see
:mod:`allfold_agent.groups.lane.records`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from allfold_agent.execution.op import Op
from allfold_agent.execution.stand_ins import StandIn
from allfold_core.agent_answers import Clocks, RecordedCall, RecordedOp, RecordedRound
from allfold_core.operations import Fingerprint

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup


class OpStage(StrEnum):
    """The progress of an op on this node.

    =========  ==================================================
    CALLED     not all that it needs is there: mostly, local ranks
    STARTED    it is being worked on
    COMPLETED  every local rank has its result
    FAILED     the local ranks that have called it got an error
    DROPPED    no rank here had a part in it any more
    =========  ==================================================
    """

    CALLED = "called"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"
    DROPPED = "dropped"

    @property
    def is_over(self) -> bool:
        return self not in (OpStage.CALLED, OpStage.STARTED)


class OpRecord(NamedTuple):
    """One op on this node. Times without a unit are monotonic; 0.0 is one that is not known.

    Attributes:
        epoch: the ordinal of the epoch in which it ran.
        world_size: the ranks of that epoch, on all nodes.
        fingerprint: the call; ``None`` where no local rank has made it.
        state: how far it has come.
        start: the first local call.
        seconds: from the first local call until the outcome, or until now.
        arrivals: by local rank, seconds after the first one.
        missing: the local ranks that have not called it.
        error: the error's code, empty for a success.
        reason: the error's message.
        other_calls: by local rank, the calls that are not like ``fingerprint``.
        began: its work began, with the fold of the local inputs.
        heard: by node, when its first data were taken in.
        exchanged: all was sent to other nodes, and all of theirs is folded.
        settled: the nodes agreed on a result, which the local ranks get from now on.
        is_short: the ranks did it by themselves, in the short lane.
        round: who took part in a weighted mean, once that is known.
    """

    seq: int
    epoch: int
    world_size: int
    fingerprint: Fingerprint | None
    strategy: str
    state: OpStage
    start: float
    seconds: float
    arrivals: Mapping[int, float]
    missing: tuple[int, ...] = ()
    error: str = ""
    reason: str = ""
    other_calls: Mapping[int, Fingerprint] = {}
    began: float = 0.0
    heard: Mapping[str, float] = {}
    exchanged: float = 0.0
    settled: float = 0.0
    is_short: bool = False
    round: RecordedRound | None = None

    @property
    def what(self) -> str:
        """The call for people: ``all_reduce(sum, float32[1024])``."""
        return self.fingerprint.describe() if self.fingerprint else ""

    def to_dict(self, clock: Clocks) -> RecordedOp:
        """Return the JSON form: times are seconds after ``start``.

        Args:
            clock: this machine's, read just now.
        """
        return {
            "seq": self.seq,
            "epoch": self.epoch,
            "world_size": self.world_size,
            **(described(self.fingerprint) if self.fingerprint else RecordedCall(what="")),
            "strategy": self.strategy,
            "lane": "short" if self.is_short else "long",
            "state": self.state.value,
            "start": self.start,
            "started_at": clock["wall"] - (clock["monotonic"] - self.start),
            "seconds": self.seconds,
            "arrivals": {str(rank): after for rank, after in self.arrivals.items()},
            "missing": list(self.missing),
            "phases": self._phases(),
            "heard": {node: at - self.start for node, at in self.heard.items()},
            "error": self.error,
            "reason": self.reason,
            "other_calls": {str(rank): described(call) for rank, call in self.other_calls.items()},
            "round": self.round,
        }

    def _phases(self) -> dict[str, float]:
        """Return the seconds after ``start`` at which it came to a phase, of those known."""
        known = {"began": self.began, "exchanged": self.exchanged, "settled": self.settled}
        phases = {name: at - self.start for name, at in known.items() if at}
        if self.arrivals and not self.missing:
            phases["called"] = max(self.arrivals.values())
        if self.state.is_over:
            phases["done"] = self.seconds
        return dict(sorted(phases.items(), key=lambda each: each[1]))


def described(call: Fingerprint) -> RecordedCall:
    """Return a call in words, and its parts for programs."""
    return {
        "what": call.describe(),
        "kind": call.kind.label,
        "reduce_op": call.reduce_op.label if call.reduce_op else None,
        "dtype": call.label,
        "shape": list(call.shape),
        "numel": prod(call.shape),
        "bytes": call.numel * call.dtype.itemsize,
        "root": call.root,
        "counts": list(call.counts),
        "wire": call.wire.label,
    }


def record(op: Op) -> OpRecord:
    """Return the record of an op that is over."""
    if op.error is not None:
        state, code, reason = OpStage.FAILED, op.error.code, op.error.message
    else:
        state, code, reason = OpStage.COMPLETED if op.settled_at else OpStage.DROPPED, "", ""
    return _recorded(op, state, code, reason)


def record_in_flight(op: Op) -> OpRecord:
    """Return the record of an op that is not over, as far as it has come. With the table's lock."""
    return _recorded(op, OpStage.STARTED if op.running else OpStage.CALLED, "", "")


def _recorded(op: Op, state: OpStage, code: str, reason: str) -> OpRecord:
    start, arrivals = op.first_arrival, op.arrivals
    is_complete = len(arrivals) == len(op.ranks)
    return OpRecord(
        op.seq,
        op.ordinal,
        op.participants,
        op.fingerprint if arrivals else None,
        op.strategy,
        state,
        start,
        monotonic() - start,
        {rank: each.at - start for rank, each in arrivals.items()},
        () if is_complete else tuple(rank for rank in op.ranks if rank not in arrivals),
        code,
        reason,
        _other_calls(op) if not op.uniform else {},
        op.began_at,
        _heard(op) if op.receivers else {},
        op.exchanged_at,
        op.settled_at,
        round=_round(op) if op.weights else None,
    )


def _other_calls(op: Op) -> dict[int, Fingerprint]:
    return {
        rank: each.spec.fingerprint
        for rank, each in op.arrivals.items()
        if each.spec is not op.spec and each.spec.common != op.spec.common
    }


def _round(op: Op) -> RecordedRound:
    places = op.arrivals.items()
    return {
        "weight": sum(op.weights),
        "absent": [rank for rank, weight in enumerate(op.weights) if not weight],
        "late": sorted(rank for rank, each in places if isinstance(each.connection, StandIn)),
        "sent_bytes": op.sent_bytes,
    }


def _heard(op: Op) -> dict[str, float]:
    return {node: each.heard_at for node, each in op.receivers.items() if each.heard_at}


_ENDED_KEPT = 16


@dataclass(frozen=True, slots=True)
class GroupRecording:
    """The flight recorder of one group, and what is needed to read it.

    Attributes:
        epoch: the ordinal of the newest epoch; ``world_size``, ``nodes`` and ``ranks`` (those of
            this node) are of that.
        last_seq: the last op that each rank of this node has called; -1 for none.
        is_open: the group is not over on this node.
        ops: in the order of their numbers.
    """

    group: str
    opening: int
    epoch: int
    world_size: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    last_seq: Mapping[int, int]
    is_open: bool
    ops: tuple[OpRecord, ...]


def recording_of(group: NodeGroup, *, is_open: bool = True) -> GroupRecording:
    """Return the recording of a group: its latest ops, and those in flight. From any thread."""
    records = group.lanes.records
    records.harvest()
    with group.table.lock:
        epoch, called = group.current, records.last_called()
        ops = list(group.outcomes.recent)
        ops += [record_in_flight(op) for op in group.table.in_flight.values() if op.calls]
        ops += [posted.record for posted in records.in_flight()]
    return GroupRecording(
        group.name,
        group.opening,
        epoch.ordinal,
        epoch.plan.world_size,
        tuple(member.node for member in epoch.plan.members),
        epoch.ranks,
        called,
        is_open,
        tuple(sorted(ops, key=lambda each: each.seq)),
    )


class Recordings:
    """Keeps the recordings of the latest groups that are over: a job that failed is looked at then.

    From any thread.
    """

    def __init__(self) -> None:
        self._ended: deque[GroupRecording] = deque(maxlen=_ENDED_KEPT)

    def keep(self, group: NodeGroup) -> None:
        """Take the recording of a group that is over."""
        self._ended.append(recording_of(group, is_open=False))

    def ended(self) -> list[GroupRecording]:
        """Return the recordings of groups that are over, the latest last."""
        return list(self._ended)
