"""Sends and receives that wait: for which rank of this node, and whether that waits itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from allfold_agent.groups.epoch import GroupEpoch
from allfold_agent.groups.group import NodeGroup
from allfold_agent.p2p.messages import PendingCall
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.protocol.peer_link import LinkMessageType


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits because a rank has not made the call that belongs to it.

    Attributes:
        subject: what waits, for people.
        since: when that was called first (monotonic).
        seq: the op; ``None`` for a message.
        patience: for how many seconds it may wait before a rank whose process runs is late.
        waits_itself: the rank has called something else that is not done, so it is late only if its
            process does not wait for that.
    """

    subject: str
    since: float
    seq: int | None = None
    patience: float = 0.0
    waits_itself: bool = False


# From here on the node of the rank that is waited for is told.
_TELL_SECONDS = 0.25
_NEWS_SECONDS = 1.0
# In one message to a node; the oldest waits.
_MOST_TOLD = 64
# The stages of a pipeline, and servers, wait for messages as a matter of course.
_LATE_SECONDS = 10.0
_URGENT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _MessageWait:
    """A send or receive whose other side has not been called, as far as its node knows.

    Attributes:
        caller: the rank that waits.
        peer: the rank that is waited for.
        what: the call, for people.
        since: when it was made (monotonic).
        is_urgent: a collective op waits for the caller, maybe over others that wait for it.
    """

    caller: int
    peer: int
    what: str
    since: float
    is_urgent: bool = False


class MessageWaits:
    """The sends and receives of one group that wait for ranks of this node."""

    def __init__(self, group: NodeGroup) -> None:
        self._group = group
        self._told: dict[str, tuple[list[_MessageWait], float]] = {}  # by node, and when it said so

    def hear(self, node: str, body: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take in which messages of another node wait for ranks of this one."""
        waits = [
            _MessageWait(
                int(each["caller"]),
                int(each["peer"]),
                str(each["what"]),
                now - float(each["age"]),
                bool(each["urgent"]),
            )
            for each in body
        ]
        self._told[node] = waits, now

    def forget(self) -> None:
        """Forget what other nodes have said: the ranks have other numbers."""
        self._told.clear()

    def look(self, now: float, in_ops: Set[int], op_waits: Mapping[int, Wait]) -> dict[int, Wait]:
        """Return the op or message that waits for each local rank; tell other nodes of theirs.

        Args:
            in_ops: the local ranks that wait in collective ops.
            op_waits: by local rank, the op that waits for it.
        """
        ranks, heard = self._group.current.ranks, self._heard(now)
        own = [each for each in map(self._wait_of, self._group.p2p.unmatched_calls()) if each]
        own = _with_urgency(own, heard, op_waits)
        self._tell_others([each for each in own if each.peer not in ranks], now)
        calling = self._callers()
        found = {r: replace(wait, waits_itself=r in calling) for r, wait in op_waits.items()}
        patience = max((wait.patience for wait in op_waits.values()), default=_URGENT_SECONDS)
        for each in sorted([*own, *heard], key=lambda each: each.since):
            back = next((o for o in own if (o.caller, o.peer) == (each.peer, each.caller)), None)
            if each.peer not in ranks or (each.peer in found and back is None):
                continue
            # Neither of two ranks goes on that wait for each other, in messages or with an op.
            is_cycle = back is not None or (each.is_urgent and each.peer in in_ops)
            found[each.peer] = replace(
                self._describe(each, back),
                patience=patience if each.is_urgent and each.peer not in in_ops else _LATE_SECONDS,
                waits_itself=each.peer in calling | in_ops and not is_cycle,
            )
        return found

    def _describe(self, wait: _MessageWait, back: _MessageWait | None) -> Wait:
        """Return a wait for people.

        Args:
            back: the peer's call that waits for the caller: then neither goes on.
        """
        subject = f"{wait.what} of rank {wait.caller} in group '{self._group.name}'"
        if back is None:
            return Wait(subject, wait.since)
        both = f"{subject}, while rank {back.caller} waits in {back.what},"
        return Wait(both, max(wait.since, back.since))

    def _heard(self, now: float) -> list[_MessageWait]:
        """Return what other nodes have said of late."""
        self._told = {
            node: told for node, told in self._told.items() if now - told[1] <= _NEWS_SECONDS
        }
        return [wait for waits, _ in self._told.values() for wait in waits]

    def _callers(self) -> set[int | None]:
        """Return the local ranks that wait for another one, or for the content of a message.

        Not those that receive from any rank: nobody else keeps these.
        """
        epoch, p2p = self._group.current, self._group.p2p
        from_any = {c.rank for c in p2p.unmatched_calls() if c.message.peer == ANY_SOURCE}
        callers = {call.rank for call in p2p.waiting_calls()}
        return {_number(epoch, seat) for seat in callers - from_any}

    def _wait_of(self, call: PendingCall) -> _MessageWait | None:
        """Return what a call waits for, ``None`` if that is not one rank of the current epoch."""
        epoch, seat = self._group.current, call.message.peer
        peer = None if seat == ANY_SOURCE else _number(epoch, seat)
        caller = _number(epoch, call.rank)
        if peer is None or caller is None:
            return None
        return _MessageWait(caller, peer, call.describe(peer), call.began)

    def _tell_others(self, waits: Iterable[_MessageWait], now: float) -> None:
        told: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for each in sorted(waits, key=lambda each: each.since):
            age = now - each.since
            if age >= _TELL_SECONDS:
                told[self._node_of(each.peer)].append(
                    {
                        "caller": each.caller,
                        "peer": each.peer,
                        "what": each.what,
                        "age": age,
                        "urgent": each.is_urgent,
                    }
                )
        for node, of_node in told.items():
            body = {"messages": of_node[:_MOST_TOLD]}
            self._group.send(node, LinkMessageType.OBSERVED, body)

    def _node_of(self, rank: int) -> str:
        plan = self._group.current.plan
        return plan.members[plan.index_of_rank(rank)].node


def _number(epoch: GroupEpoch, seat: int) -> int | None:
    """Return the rank of a seat, ``None`` if it is gone or has just come."""
    return epoch.seats.index(seat) if seat in epoch.seats else None


def _with_urgency(
    own: Sequence[_MessageWait], heard: Sequence[_MessageWait], awaited: Collection[int]
) -> list[_MessageWait]:
    """Return the waits of this node; urgent are those of ranks that an op waits for in the end.

    Args:
        heard: the waits of other nodes.
        awaited: the local ranks that ops wait for.
    """
    urgent = {*awaited, *(each.peer for each in heard if each.is_urgent)}
    for _ in own:  # a chain has no more links than there are waits
        urgent |= {each.peer for each in own if each.caller in urgent}
    return [replace(each, is_urgent=each.caller in urgent) for each in own]
