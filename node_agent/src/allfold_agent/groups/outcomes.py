"""The outcome of every op of a group: settled once, sent to the ranks, remembered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from allfold_agent.execution.op import Op, RankEndpoint
from allfold_agent.groups.flight_recorder import OpRecord, record
from allfold_agent.groups.op_table import OpTable
from allfold_core.errors import AllfoldError, ServiceError
from allfold_core.wire.local_wire import Message, Outcome

log = logging.getLogger(__name__)

RECORDED_OPS = 512
REMEMBERED_FAILURES = 512

Cancel = Callable[[Op, Callable[[], None]], None]


class Outcomes:
    """Ends ops. One object for all epochs of a group on this node.

    Args:
        group: its name.
        node: the name of this node.
        table: the ops in flight.
        cancel: stops a running op, then calls back.

    Attributes:
        recent: the latest ops that are over, newest last.
    """

    def __init__(self, group: str, node: str, table: OpTable, cancel: Cancel) -> None:
        self.recent: deque[OpRecord] = deque(maxlen=RECORDED_OPS)
        self._group = group
        self._node = node
        self._table = table
        self._cancel = cancel
        self._failed: dict[int, AllfoldError] = {}

    # Success

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; return False if it has failed before."""
        with self._table.lock:
            if op.ended:
                return False
            op.ended = True
            return True

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
        with self._table.lock:
            self._retire(op)
        for arrival in op.arrivals.values():
            if op.error is None:
                number, members = arrival.group_number, op.participants
                outcome = Outcome(Message.DONE, number, op.seq, op.ordinal, members)
                arrival.connection.send_outcome(outcome)
            else:
                refuse(arrival.connection, arrival.group_number, op.seq, op.error, op.ordinal)

    # Failure; called with the table's lock held

    def of(self, seq: int) -> AllfoldError | None:
        """The error of an op that has failed by a verdict."""
        return self._failed.get(seq)

    def remember(self, seq: int, error: AllfoldError) -> None:
        """Keep a verdict for the ranks that have yet to call the op."""
        self._failed[seq] = error

    def forget_before(self, seq: int) -> None:
        """Drop verdicts that every local rank knows: all of them have called this op."""
        for old in [each for each in self._failed if each < seq - REMEMBERED_FAILURES]:
            del self._failed[old]

    def fail(self, op: Op, error: AllfoldError) -> None:
        """End an op with an error, and send it to the ranks that have called."""
        op.ended = True
        op.error = error
        self._retire(op)

        def report() -> None:
            for arrival in op.arrivals.values():
                refuse(arrival.connection, arrival.group_number, op.seq, error, op.ordinal)

        self._cancel(op, report)

    def _retire(self, op: Op) -> None:
        self._table.in_flight.pop(op.seq, None)
        self.recent.append(record(op))


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
