"""The deadlines of a group's calls: ops that wait, verdicts on late ones, and standstills."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from allfold_agent.execution.op import Arrival, Op, RankEndpoint
from allfold_agent.groups.lane.records import PostedOp
from allfold_agent.p2p.messages import PendingCall
from allfold_core.protocol.rank_messages import pack_hold
from allfold_core.survival.reports import Doubt, Reason

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup
    from allfold_agent.groups.neighbours import Neighbours

DEADLINE_RETRY_SECONDS = 1.0
INCIDENTS_AT_ONCE = 8


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


def waiting_ops(group: NodeGroup) -> list[WaitingOp]:
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

    def go_on(self, now: float, waiting: Iterable[Op | PendingCall]) -> None:
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
    callers: Iterable[Arrival | PendingCall], waits_for: str, seconds: float
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


class Deadlines:
    """Watches the deadlines of a group's calls. In the reactor's thread."""

    def __init__(self, group: NodeGroup, neighbours: Neighbours) -> None:
        self._group = group
        self._neighbours = neighbours
        self._standstill = Standstill()

    def check(self, now: float) -> None:
        """Ask for a verdict on ops whose deadline is over; look at the links."""
        if self._stands_still(now):
            return
        self._expire_messages(now)
        self._group.runs.doubt(
            [Doubt(op.seq, Reason.DEADLINE, op.timeout) for op in self._overdue(now)]
        )
        if self._group.evicted is None:
            self._group.link_watch.look(now)  # last, as no op waits for it

    def waits_for(self) -> str:
        """Return what the group waits for while nothing can be decided; ``""`` at other times.

        That is so during a round, and while a node cannot be reached and it is not decided yet
        whether the group goes on without it.
        """
        obstacles, machine = self._neighbours.obstacles(self._group), self._group.agreement.machine
        if obstacles.missing:
            return obstacles.describe()
        if not machine.frozen:
            return ""
        return describe_round(self._group.agreement.waits_for or (machine.term.leader,))

    def held_for(self, now: float) -> float:
        """Return for how many seconds nothing can be decided."""
        return self._standstill.seconds(now)

    def _stands_still(self, now: float) -> bool:
        """Return True while nothing can be decided; moves the deadlines of calls for that time.

        Ranks that wait for their ops are told once a second.
        """
        waits_for = self.waits_for()
        with self._group.table.lock:
            if not waits_for or not self._group.waiting:  # nobody looks again until there is a call
                self._standstill.end()
                return False
            ops = [op for op in self._group.table.in_flight.values() if not op.ended]
            messages = self._group.p2p.waiting_calls()
            self._standstill.go_on(now, chain(ops, messages))
            if not self._standstill.is_time_to_tell():
                return True
            arrivals = chain.from_iterable(op.calls.values() for op in ops)
            told = hold_messages(chain(arrivals, messages), waits_for, self.held_for(now))
        for connection, hold in told:
            connection.send(hold)
        return True

    def _overdue(self, now: float) -> list[Op]:
        """The ops that need a verdict, because their deadline is over; some at a time."""
        with self._group.table.lock:
            patience = self._shortened_patience()
            late = [
                op
                for op in self._group.table.in_flight.values()
                if not op.ended and now >= op.next_deadline - patience
            ][:INCIDENTS_AT_ONCE]
            for op in late:
                op.next_deadline = now + DEADLINE_RETRY_SECONDS
        return late

    def _shortened_patience(self) -> float:
        """Return how much earlier ops give up that wait for ranks to join."""
        if not self._group.agreement.machine.policy.waits_in_ops(self._group.current.record):
            return 0.0
        return max(0.0, self._group.plan.options.timeout - self._group.plan.options.join_timeout)

    def _expire_messages(self, now: float) -> None:
        """Fail sends and receives that are past their deadline."""
        group = self._group
        if group.p2p.waiting:
            seats, hindered = group.current.seats, group.hindrances.of_ranks()
            group.p2p.expire(now, {seats[r]: how for r, how in hindered.items() if r < len(seats)})
