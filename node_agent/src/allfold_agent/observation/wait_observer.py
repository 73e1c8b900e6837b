"""Ops and messages that wait: for which local rank, and what its process does instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from allfold_agent.groups.deadlines import WaitingOp, waiting_ops
from allfold_agent.groups.group import NodeGroup
from allfold_agent.observation.incidents import Incidents
from allfold_agent.observation.message_waits import MessageWaits, Wait
from allfold_agent.observation.processes import look_at, stacks_of
from allfold_agent.observation.samples import GroupSampler
from allfold_core.diagnosis.processes import LateCause, ProcessLook, explain, lock_holder
from allfold_core.incident import Cause, Effect, Incident, rank_culprit
from allfold_core.protocol.peer_link import LinkMessageType

# From here on the ranks that are missing are looked at, and other nodes are told.
_LOOK_SECONDS = 0.25
# A process that is stopped does not go on by itself; one that runs may be about to call.
_CERTAIN_SECONDS = 0.6
_LATE_SECONDS = 1.0
# A rank that has called nothing yet may still load what it needs.
_FIRST_CALL_SECONDS = 10.0
# Ranks that always wait for each other are late when they wait longer than that.
_UNUSUAL = 3.0
_NEWS_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 1.0
# So long one look reads stacks; the ranks that are left have their turn in the next look.
_STACKS_SECONDS = 0.5
_BUSY_GPU = "has called it, but its GPU is busy with what it was given before"
_NOT_VISIBLE = "runs in another container, so that its agent cannot see what it does"
_CERTAIN = frozenset({Cause.STOPPED_RANK, Cause.EXITED_RANK})


@dataclass(slots=True)
class _Suspect:
    """A rank that is waited for: what was seen of its process at first, and when to look again."""

    first: ProcessLook | None
    look_at: float = 0.0


class WaitObserver:
    """Watches what the ops of one group wait for on this node."""

    def __init__(self, group: NodeGroup, incidents: Incidents, sampler: GroupSampler) -> None:
        self._group = group
        self._incidents = incidents
        self._sampler = sampler
        self._messages = MessageWaits(group)
        self._told: dict[str, tuple[int, Wait, float]] = {}  # by node: op, wait, when it said so
        self._suspects: dict[int, _Suspect] = {}
        self._stamp = group.current.stamp
        self._stacks_until = 0.0

    def hear(self, node: str, body: Mapping[str, Any], now: float) -> None:
        """An op of another node waits for this one."""
        seq = int(body["seq"])
        wait = self._op_wait(seq, str(body["what"]), now - float(body["age"]))
        self._told[node] = seq, wait, now

    def hear_of_messages(self, node: str, body: list[Mapping[str, Any]], now: float) -> None:
        """Messages of another node wait for ranks of this one."""
        self._messages.hear(node, body, now)

    def look(self, now: float, wall: float, pids: Mapping[str, int]) -> None:
        """Look once.

        Args:
            pids: by session, the processes of this node's ranks of the group.
        """
        self._begin_anew_with_other_ranks()
        waiting = waiting_ops(self._group)
        if waiting:
            self._tell_others(waiting[0], now)
        in_ops = _ranks_that_wait(waiting, self._group.current.ranks)
        waits = self._messages.look(now, in_ops, self._op_waits(waiting, now))
        for rank in self._suspects.keys() - waits.keys():
            del self._suspects[rank]
            self._incidents.end(self._key(rank))
        self._stacks_until = monotonic() + _STACKS_SECONDS
        for rank, wait in waits.items():
            if now - wait.since >= _LOOK_SECONDS:
                self._look_at(rank, pids.get(self._session(rank)), wait, now, wall)

    def _begin_anew_with_other_ranks(self) -> None:
        """Forget what was said of ranks that have other numbers now, or none."""
        stamp = self._group.current.stamp
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._told.clear()
        self._messages.forget()
        for rank in self._suspects:
            self._incidents.end(self._key(rank))
        self._suspects.clear()

    def _tell_others(self, op: WaitingOp, now: float) -> None:
        """Tell the nodes for whose data the oldest op waits."""
        if now - op.since < _LOOK_SECONDS:
            return
        body = {"waits": {"seq": op.seq, "what": op.what, "age": now - op.since}}
        for node in op.silent:
            self._group.send(node, LinkMessageType.OBSERVED, body)

    def _op_waits(self, waiting: list[WaitingOp], now: float) -> dict[int, Wait]:
        """Return the ranks of this node that ops wait for, each with the first such op."""
        found: dict[int, tuple[int, Wait]] = {}
        for op in waiting:
            for rank in op.missing:
                found.setdefault(rank, (op.seq, self._op_wait(op.seq, op.what, op.since)))
        last_called = self._group.lanes.records.last_called()
        oldest = waiting[0].seq if waiting else float("inf")
        for node, (seq, wait, heard) in list(self._told.items()):
            if now - heard > _NEWS_SECONDS:
                del self._told[node]
            if now - heard > _NEWS_SECONDS or oldest < seq:
                continue  # ranks here wait in an op before it
            for rank, last in last_called.items():
                if last < seq and (rank not in found or seq < found[rank][0]):
                    found[rank] = seq, wait
        return {
            rank: replace(wait, patience=self._patience(last_called.get(rank, -1)))
            for rank, (_, wait) in found.items()
        }

    def _op_wait(self, seq: int, what: str, since: float) -> Wait:
        return Wait(f"op {seq} of group '{self._group.name}', {what},", since, seq=seq)

    def _patience(self, last_called: int) -> float:
        if last_called < 0:
            return _FIRST_CALL_SECONDS
        return max(_LATE_SECONDS, _UNUSUAL * self._sampler.usual_skew())

    def _look_at(self, rank: int, pid: int | None, wait: Wait, now: float, wall: float) -> None:
        suspect = self._suspects.get(rank)
        if suspect is None:
            self._suspects[rank] = _Suspect(look_at(pid) if pid else None)
            return
        age = now - wait.since
        if age < _CERTAIN_SECONDS or now < suspect.look_at:
            return
        finding = self._finding(rank, pid, wait, suspect.first, reads_stacks=False)
        if finding.cause not in _CERTAIN:
            if age < wait.patience or monotonic() > self._stacks_until:
                return
            finding = self._finding(rank, pid, wait, suspect.first, reads_stacks=True)
        suspect.look_at = monotonic() + _LOOK_AGAIN_SECONDS
        suspect.first = look_at(pid) if pid else None
        if wait.waits_itself and finding.may_be_in_call:
            self._incidents.end(self._key(rank))  # another rank keeps this one
        else:
            self._open(rank, wait, finding, wall - age)

    def _finding(
        self,
        rank: int,
        pid: int | None,
        wait: Wait,
        first: ProcessLook | None,
        *,
        reads_stacks: bool,
    ) -> LateCause:
        session = self._session(rank)
        if self._waits_for_gpu(session, wait):
            return LateCause(Cause.LATE_RANK, _BUSY_GPU)
        if not pid or first is None:
            return LateCause(Cause.LATE_RANK, _NOT_VISIBLE, may_be_in_call=True)
        last = look_at(pid)
        stacks = stacks_of(pid) if reads_stacks else ()
        again = stacks_of(pid) if lock_holder(stacks) is not None else ()
        return explain(first, last, stacks, again)

    def _waits_for_gpu(self, session: str, wait: Wait) -> bool:
        return wait.seq is not None and any(
            each == session and seq <= wait.seq for each, seq in list(self._group.deferred)
        )

    def _open(self, rank: int, wait: Wait, finding: LateCause, began: float) -> None:
        group = self._group
        sentence = (
            f"{wait.subject} waits for rank {rank} on node {group.node}: its process "
            f"{finding.phrase}"
        )
        is_slow = finding.cause is Cause.STARVED_RANK
        self._incidents.open(
            self._key(rank),
            Incident(
                "",
                finding.cause,
                Effect.SLOW if is_slow else Effect.HANG,
                rank_culprit(rank, group.node),
                sentence,
                group.name,
                group.opening,
                wait.seq,
                began,
                evidence={"process": finding.phrase},
            ),
        )

    def _key(self, rank: int) -> tuple[str, int, str, int]:
        return self._group.name, self._group.opening, "wait", rank

    def _session(self, rank: int) -> str:
        sessions = self._group.current.plan.sessions
        return sessions[rank] if rank < len(sessions) else ""


def _ranks_that_wait(waiting: list[WaitingOp], ranks: Sequence[int]) -> set[int]:
    """Return the local ranks that have called an op that is not done."""
    return {rank for op in waiting for rank in ranks if rank not in op.missing}
