"""The ops of a group on this node: those that are not over, and how the others have ended."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition

from allfold_agent.execution.op import Op, RankEndpoint
from allfold_agent.groups.flight_recorder import OpRecord, OpStage, record
from allfold_agent.runtime.locks import make_lock, make_rlock
from allfold_core.errors import AllfoldError, Evicted, ServiceError
from allfold_core.protocol.rank_messages import Message, Outcome
from allfold_core.survival.judge import NODE_LOST
from allfold_service.metrics import Histogram

log = logging.getLogger(__name__)

# From an op among ranks of one node to one that waits for a rank that has lost its way.
SECONDS_BOUNDS = (
    1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0,
)  # fmt: skip
RECORDED_OPS = 512
_KEPT_FAILURES = 64
_KEPT_ROUNDS = 8


class OpTable:
    """Shared by a group, its epochs and its outcomes.

    Attributes:
        lock: held for every change of an op's state.
        changed: notified when the members of the group may have changed.
        in_flight: the ops that a local rank has called and that are not over, by number.
    """

    def __init__(self) -> None:
        self.lock = make_rlock("group")
        self.changed = Condition(self.lock)
        self.in_flight: dict[int, Op] = {}


def breakdown(group: str, node: str, seq: int, error: Exception) -> ServiceError:
    """The error of an op that a node cannot do its part of."""
    reason = error.message if isinstance(error, AllfoldError) else repr(error)
    return ServiceError(
        f"op {seq} of group '{group}' failed: node {node}: {reason}; the log of that node says "
        "more. The group is usable.",
        seq=seq,
        group=group,
    )


def evicted(group: str, node: str, how: str) -> Evicted:
    """The error of every call on a node without which the group goes on.

    Args:
        how: a phrase to follow the name of the node.
    """
    return Evicted(f"group '{group}' goes on without node {node}, which {how}", node=node)


def how_lost(loss: AllfoldError, session: str) -> str:
    """The way in which a rank was lost, from the error of the loss; a phrase to follow its name."""
    return str(loss.details.get("lost", {}).get(session, NODE_LOST))


LONG, SHORT = "long", "short"

OpKey = tuple[str, str, str, str]
"""Kind, strategy, dtype and lane of ops that are counted together."""


class ErrorCounts:
    """The number of ops that have failed on this node, in all groups, also those that are over."""

    def __init__(self) -> None:
        self._lock = make_lock("errors")
        self._counts: Counter[str] = Counter()

    def count(self, code: str) -> None:
        """Count an op that has failed with an error of this code."""
        with self._lock:
            self._counts[code] += 1

    def by_code(self) -> Counter[str]:
        """Return the numbers by the code of the error."""
        with self._lock:
            return self._counts.copy()


class Tally:
    """Counts records as they are made: all of the long lane, those of the short one that are seen.

    Changed with the table's lock held; what is counted may be read without it.

    Args:
        errors: of all groups of the node.

    Attributes:
        seconds: of ops that have succeeded.
        skews: by lane, the seconds between their first and last local call.
        rounds: the latest weighted means, newest last.
        round_count: how many of them there were.
        late_ranks: how many ranks of this node they did not wait for.
    """

    def __init__(self, errors: ErrorCounts) -> None:
        self.seconds: dict[OpKey, Histogram] = {}
        self.skews = {lane: Histogram(SECONDS_BOUNDS) for lane in (LONG, SHORT)}
        self.rounds: deque[OpRecord] = deque(maxlen=_KEPT_ROUNDS)
        self.round_count = self.late_ranks = 0
        self._errors = errors
        self._first: int | None = None
        self._called = 0

    def count(self, record: OpRecord, lane: str) -> None:
        """Count an op that is over."""
        if record.error:
            self._errors.count(record.error)
            return
        called = record.fingerprint
        if called is None or record.state is OpStage.DROPPED:  # no rank here has a part in it
            return
        key = called.kind.label, record.strategy, called.dtype.label, lane
        seconds = self.seconds.get(key)
        if seconds is None:
            seconds = self.seconds[key] = Histogram(SECONDS_BOUNDS)
        seconds.observe(record.seconds)
        self.skews[lane].observe(max(record.arrivals.values()))
        if record.round is not None:
            self.rounds.append(record)
            self.round_count += 1
            self.late_ranks += len(record.round["late"])

    def called(self, first: int, last: int) -> int:
        """Return how many ops ranks of this node have called; the number never falls.

        Args:
            first: the first op in which they have a part.
            last: the last one that any of them has called.
        """
        if self._first is None:
            self._first = first
        self._called = max(self._called, last + 1 - self._first)
        return self._called


@dataclass(frozen=True, slots=True)
class FailedOp:
    """An op that has failed for the ranks of this node.

    Attributes:
        ranks: of this node, in the numbers that the error has.
    """

    seq: int
    error: AllfoldError
    ranks: tuple[int, ...]


class Outcomes:
    """Tells the local ranks how ops have ended. One object for all epochs of a group on this node.

    Args:
        group: its name.
        node: the name of this node.
        table: the ops in flight.
        errors: counts those that fail, of all groups of the node.

    Attributes:
        recent: the latest ops that are over, newest last.
        failures: the latest ops that have failed, until somebody takes them.
        tally: counts those that are over.
        on_idle: called with the lock held when no op is in flight any more.
    """

    def __init__(self, group: str, node: str, table: OpTable, errors: ErrorCounts) -> None:
        self.on_idle: Callable[[], None] = lambda: None
        self.recent: deque[OpRecord] = deque(maxlen=RECORDED_OPS)
        self.failures: deque[FailedOp] = deque(maxlen=_KEPT_FAILURES)
        self.tally = Tally(errors)
        self._group = group
        self._node = node
        self._table = table

    def end(self, op: Op, error: Exception | None) -> None:
        """Report to the local ranks that their results are written, or could not be."""
        if error is not None:
            log.error("op %d has no result for the ranks of this node", op.seq, exc_info=error)
            op.error = ServiceError(
                f"op {op.seq} of group '{self._group}': node {self._node} could not deliver the "
                f"result: {error!r}; its log has the traceback",
                seq=op.seq,
                group=self._group,
            )
            self.refuse(op)
            return
        # Before the ranks are told: their next call must not be one too many because of this one.
        with self._table.lock:
            self.retire(op)
        members, boundary, outcome = op.participants, op.boundary, None
        for arrival in op.calls.values():
            number, report = arrival.group_number, op.report(arrival)
            # Nearly always one for all ranks.
            if outcome is None or outcome.group != number or report is not None:
                outcome = Outcome(
                    Message.DONE, number, op.seq, op.ordinal, members, report, boundary
                )
            arrival.connection.send_outcome(outcome)

    def refuse(self, op: Op) -> None:
        """Report to the local ranks that have called an op that it has failed."""
        assert op.error is not None
        self.failures.append(FailedOp(op.seq, op.error, tuple(op.ranks)))
        # Before the ranks are told, as in end.
        with self._table.lock:
            self.retire(op)
            calls = list(op.calls.values())
        for arrival in calls:
            refuse(arrival.connection, arrival.group_number, op.seq, op.error, op.ordinal)

    def retire(self, op: Op) -> None:
        """The op is over here; with the table's lock held."""
        in_flight = self._table.in_flight
        in_flight.pop(op.seq, None)
        over = record(op)
        self.recent.append(over)
        self.tally.count(over, LONG)
        if not in_flight:
            self.on_idle()

    def add_seen(self, records: Iterable[OpRecord]) -> None:
        """Record ops that ranks have done by themselves; with the table's lock held."""
        for each in records:
            self.recent.append(each)
            self.tally.count(each, SHORT)


def refuse(
    connection: RankEndpoint, number: int, seq: int, error: AllfoldError, ordinal: int
) -> None:
    """Send a rank the error of its call.

    Args:
        number: what the rank calls the group.
        ordinal: of the epoch that the rank is in once it has the error.
    """
    body = error.to_dict()
    connection.send_outcome(Outcome(Message.FAILED, number, seq, ordinal, body=body))
