"""The attempts of ops: started, cancelled and handed out as the nodes have agreed."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Collection
from functools import partial
from time import monotonic
from typing import Protocol

from allfold_agent.execution.op import Op
from allfold_agent.execution.result_writer import ResultWriter
from allfold_agent.groups.epoch import Epoch
from allfold_agent.groups.event_queue import Action, EventQueue
from allfold_agent.groups.fetches import Fetches
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.outcomes import Outcomes, refuse
from allfold_agent.groups.results import Results
from allfold_core.errors import AllfoldError
from allfold_core.survival import records
from allfold_core.survival.instructions import Fetch, HandOut, Refuse, Start
from allfold_core.survival.judge import unpacked
from allfold_core.survival.records import Stamp

log = logging.getLogger(__name__)


def _number(start: tuple[Op, Epoch]) -> int:
    return start[0].seq


class Progress(Protocol):
    """Told how attempts go: the group."""

    def watermark(self) -> int:
        """All ops up to this one are final on this node."""

    def enter(self, op: Op, stamp: Stamp) -> Epoch:
        """Have an op run in the epoch of a stamp; returns that."""

    def cancel(self, op: Op, forward: bool) -> None:
        """Stop the attempt of an op; :meth:`OpRuns.free` is called then, maybe at once."""

    def take_completion(self, seq: int, stamp: Stamp) -> None:
        """Nothing of an attempt is left to do but to write its result."""

    def cannot_run(self, seq: int, error: Exception, stamp: Stamp) -> None:
        """This node cannot do its part of an attempt."""

    def resume_frames(self) -> None:
        """An op has begun: frames of it, and those behind them, may go on."""

    def may_begin(self, seq: int) -> bool:
        """Return False while an earlier op may yet have to begin on this node."""


class OpRuns:
    """Runs the ops of a group, each in the epoch that the agreement says. With the table's lock.

    An attempt that was given up may still write to the memory of ranks for a moment. The next step
    of its op waits until that is over, and so do the starts of later ops, because ops are in order
    on every edge. Work that takes time is done without the lock.
    """

    def __init__(
        self,
        table: OpTable,
        outcomes: Outcomes,
        results: Results,
        writer: ResultWriter,
        fetches: Fetches,
        events: EventQueue,
        progress: Progress,
    ) -> None:
        self._table = table
        self._outcomes = outcomes
        self._results = results
        self._writer = writer
        self._fetches = fetches
        self._add_due = events.add_due
        self._progress = progress
        self._waiting: list[tuple[Op, Epoch]] = []

    # Attempts

    def start(self, each: Start) -> None:
        """Have an attempt begin, as soon as it may."""
        op = self._table.in_flight[each.seq]
        epoch = self._progress.enter(op, each.epoch.stamp)
        insort(self._waiting, (op, epoch), key=_number)  # not all ops are called in order here

    @property
    def is_waiting(self) -> bool:
        """True while an attempt waits until it may begin. From any thread."""
        return bool(self._waiting)

    def begin_waiting(self) -> None:
        """Begin what may begin, in order; at the end of every event.

        A group that keeps more results than its share only begins its oldest op: other nodes may
        wait for that one, and it waits for none of the ops behind it.
        """
        waiting = self._waiting
        while waiting and self._may_begin(waiting[0][0]):
            self._begin(*waiting.pop(0))

    def _may_begin(self, op: Op) -> bool:
        if op.leaving or not self._progress.may_begin(op.seq):
            return False
        if self._results.has_room:
            return True
        under_way = (each for each in self._table.in_flight.values() if each.running)
        return all(each.ended or each.seq > op.seq for each in under_way)

    def _begin(self, op: Op, epoch: Epoch) -> None:
        if others := op.calls.keys() - epoch.record.sessions:
            self._refuse_others(op, others, epoch)
        if not op.agrees():
            return  # its ranks will hear of a verdict
        runner = epoch.runner
        op.began_at = monotonic()
        try:
            runner.prepare(op, self._progress.watermark)
        except Exception as error:
            log.exception("op %d cannot be run", op.seq)
            self._progress.cannot_run(op.seq, error, op.stamp)
            return
        if op.executor is None:  # all of it is here, and nothing can go wrong any more
            self._progress.take_completion(op.seq, op.stamp)
        else:
            self._table.changed.notify_all()
            self._add_due(self._progress.resume_frames)
            self._add_due(runner.start(op))

    def refuse_calls(self, seq: int, sessions: Collection[str], current: Epoch) -> None:
        """Fail the calls of ranks that have left, of an op that nobody has begun.

        Args:
            current: the newest epoch.
        """
        op = self._table.in_flight.get(seq)
        if op is not None and not op.ended and not op.leaving:
            self._refuse_others(op, op.calls.keys() & sessions, current)

    def _refuse_others(self, op: Op, sessions: Collection[str], epoch: Epoch) -> None:
        """Fail the calls of ranks that are not in the epoch of an op."""
        change = unpacked(epoch.record.change)
        for session in sessions:
            arrival = op.calls.pop(session)
            number, view = arrival.group_number, arrival.message.view
            self._add_due(partial(refuse, arrival.connection, number, op.seq, change, view))

    def cancel(self, seq: int, *, forward: bool = False) -> None:
        """Give up the attempt that is under way, or was to begin.

        Args:
            forward: it has a result on other nodes.
        """
        op = self._table.in_flight[seq]
        self._add_due(self._progress.resume_frames)  # those of the attempt go nowhere now
        waiting = [each for each in self._waiting if each[0] is op]
        for each in waiting:
            self._waiting.remove(each)
        op.next_step = None
        if op.result is not None:
            op.result.release()
            op.result = None
        if waiting:
            return
        if op.leaving:  # what was prepared since has not begun
            op.forget_attempt()
            return
        op.leaving = True
        self._progress.cancel(op, forward)

    def free(self, op: Op) -> None:
        """A cancelled attempt writes to no rank's memory any more: go on."""
        op.leaving = False
        step, op.next_step = op.next_step, None
        if step is not None:
            step()

    def _once_free(self, op: Op, action: Action) -> None:
        if op.leaving:
            op.next_step = action
        else:
            action()

    def _do_once_free(self, op: Op, action: Action) -> None:
        """Have something done without the lock, as soon as no attempt uses the ranks' memory."""
        if op.leaving:
            op.next_step = partial(self._add_due, action)
        else:
            self._add_due(action)

    # Results

    def release(self, floor: int) -> None:
        """Every node has the results up to this op."""
        self._results.release(floor)

    def fetch(self, each: Fetch) -> None:
        """Get the result from a node that has it."""
        op = self._table.in_flight[each.seq]
        epoch = self._progress.enter(op, each.stamp)
        try:
            nbytes = epoch.runner.prepare_result(op)
            fetch = self._fetches.prepare(op, each, nbytes)
        except Exception as error:  # noqa: BLE001 - its ranks are told
            self._add_due(partial(self._fetches.fail, op, each, error))
        else:
            self._add_due(fetch)

    def hand_out(self, each: HandOut) -> None:
        """Write the result to the local ranks, and keep it for other nodes."""
        op = self._table.in_flight.get(each.seq)
        if op is None or op.ended:
            return
        op.ended = True
        op.settled_at = monotonic()
        if op.error is not None:  # the others have the result, and this node cannot take it
            self._do_once_free(op, partial(self._outcomes.refuse, op))
        else:
            self._results.keep(op)
            self._do_once_free(op, partial(self._writer.write, op))

    def refuse(self, each: Refuse) -> None:
        """Send the error to the local ranks that have called."""
        op = self._table.in_flight.get(each.seq)
        if op is None or op.ended:
            return
        op.ended, op.error = True, unpacked(each.error)
        op.ordinal = each.ordinal
        self._table.changed.notify_all()
        self._add_due(self._progress.resume_frames)
        self._do_once_free(op, partial(self._outcomes.refuse, op))

    def drop(self, seq: int, current: records.Epoch) -> None:
        """Forget an op that no rank here has a part in any more; those that live are told.

        Args:
            current: the newest epoch.
        """
        op = self._table.in_flight.get(seq)
        if op is None or op.ended:
            return
        op.ended = True
        if current.change:
            op.error, op.ordinal = unpacked(current.change), current.ordinal
            self._do_once_free(op, partial(self._outcomes.refuse, op))
        else:
            self._once_free(op, lambda: self._outcomes.retire(op))

    def fail(self, op: Op, error: AllfoldError) -> None:
        """Give up an op that has no outcome, whatever was agreed upon."""
        if op.ended:
            return
        self.cancel(op.seq)
        op.ended, op.error = True, error
        self._do_once_free(op, partial(self._outcomes.refuse, op))
