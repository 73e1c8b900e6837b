"""The outcomes of the ops of a group, sent to the local ranks and recorded."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from allfold_agent.execution.op import Op, RankEndpoint
from allfold_agent.groups.flight_recorder import OpRecord, record
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.tally import LONG, SHORT, ErrorCounts, Tally
from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.wire.local_wire import Message, Outcome

log = logging.getLogger(__name__)

RECORDED_OPS = 512
_KEPT_FAILURES = 64


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
        with self._table.lock:
            self.retire(op)
        members, outcome = op.participants, None
        for arrival in op.calls.values():
            number = arrival.group_number
            if outcome is None or outcome.group != number:  # nearly always one for all ranks
                outcome = Outcome(Message.DONE, number, op.seq, op.ordinal, members, edge=op.edge)
            arrival.connection.send_outcome(outcome)

    def refuse(self, op: Op) -> None:
        """Report to the local ranks that have called an op that it has failed."""
        assert op.error is not None
        self.failures.append(FailedOp(op.seq, op.error, tuple(op.ranks)))
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
        self.tally.note(over, LONG)
        if not in_flight:
            self.on_idle()

    def add_seen(self, records: Iterable[OpRecord]) -> None:
        """Record ops that ranks have done by themselves; with the table's lock held."""
        for each in records:
            self.recent.append(each)
            self.tally.note(each, SHORT)


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
