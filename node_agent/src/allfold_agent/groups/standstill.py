"""Ops that wait: for whom, and the time in which a group cannot decide anything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from allfold_agent.execution.op import Op, RankEndpoint
from allfold_agent.groups.lane_records import PostedOp
from allfold_core.protocol.rank_messages import pack_hold

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


TELL_SECONDS = 1.0


class Obstacles(NamedTuple):
    """The obstacles to a group's decisions.

    Attributes:
        missing: the nodes that cannot be reached, each with a phrase that says so.
        orchestrator: why the orchestrator cannot say that they are gone, if so.
    """

    missing: Mapping[str, str]
    orchestrator: str | None

    def describe(self) -> str:
        """Return it in words that follow "waits for"; none where no node is missing."""
        nodes = _and(f"node {node}, which {how}" for node, how in sorted(self.missing.items()))
        if not nodes or self.orchestrator is None:
            return nodes
        return f"{nodes}; the orchestrator cannot be asked: {self.orchestrator}"


class Extendable(Protocol):
    """An op, a send or a receive: it has a deadline."""

    def extend(self, seconds: float) -> None:
        """Give it more time."""


class Caller(Protocol):
    """A call of a local rank."""

    @property
    def connection(self) -> RankEndpoint:
        """To the rank."""

    @property
    def group_number(self) -> int:
        """The rank's number for the group."""


class Standstill:
    """Moves deadlines for as long as a group waits for a decision, and lets its ranks know.

    With the table's lock held.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._seen: float | None = None
        self._untold = 0.0  # by so much deadlines were moved since ranks were told last

    def end(self) -> None:
        """The group waits no more."""
        self._seen = None

    def go_on(self, now: float, waiting: Iterable[Extendable]) -> None:
        """The group waits: what is not over has so much longer."""
        if self._seen is None:
            self._since = self._seen = now
        longer, self._seen = now - self._seen, now
        for each in waiting:
            each.extend(longer)
        self._untold += longer

    def seconds(self, now: float) -> float:
        """Return for how long the group has waited; 0 if it does not."""
        return 0.0 if self._seen is None else now - self._since

    def is_time_to_tell(self) -> bool:
        """Return True whenever deadlines were moved by another second.

        Many short waits count like a long one; otherwise a waiting rank would think that the agent
        has stopped.
        """
        if self._untold < TELL_SECONDS:
            return False
        self._untold = 0.0
        return True


def hold_messages(
    callers: Iterable[Caller], waits_for: str, seconds: float
) -> list[tuple[RankEndpoint, bytes]]:
    """Return the HOLD messages to ranks that wait, one for each."""
    waiting = {id(each.connection): each for each in callers}
    return [
        (each.connection, pack_hold(each.group_number, waits_for, seconds))
        for each in waiting.values()
    ]


def describe_round(awaited: Collection[str]) -> str:
    """Return what a group waits for if its round needs the reports of these nodes."""
    return f"the word of {_and(f'node {node}' for node in sorted(awaited))}"


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)
