"""The attempts of a group's ops on this node: begun, cancelled and handed out as was agreed."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Collection
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from allfold_agent.execution.op import Op
from allfold_agent.execution.op_edges import OpReceiver
from allfold_agent.execution.result_writer import ResultWriter
from allfold_agent.groups.epoch import GroupEpoch, NodeResources
from allfold_agent.groups.events import Action
from allfold_agent.groups.outcomes import FailedOp, breakdown, refuse
from allfold_agent.groups.results import Fetches
from allfold_core.errors import AllfoldError, PeerRefused, PeerSentIncoherentTensor
from allfold_core.survival import records
from allfold_core.survival.instructions import Fetch, HandOut, Refuse, Start
from allfold_core.survival.judge import packed, unpacked
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import Doubt, Reason

if TYPE_CHECKING:
    from allfold_agent.groups.group import NodeGroup

log = logging.getLogger(__name__)


def _number(start: tuple[Op, GroupEpoch]) -> int:
    return start[0].seq


class OpRuns:
    """Runs the ops of a group, each in the epoch that the agreement says, and tells it how they go.

    An attempt that was given up may still write to the memory of ranks for a moment. The next step
    of its op waits until that is over, and so do the starts of later ops, because ops are in order
    on every edge. Work that takes time is done without the lock.
    """

    def __init__(self, group: NodeGroup, resources: NodeResources) -> None:
        self._group = group
        self._table = group.table
        self._outcomes = group.outcomes
        self._results = group.results
        self._add_due = group.events.add_due
        self._writer = ResultWriter(resources.workers, self)
        self._fetches = Fetches(group, resources)
        self._waiting: list[tuple[Op, GroupEpoch]] = []

    # What the agreement says; with the table's lock held

    def start(self, each: Start) -> None:
        """Begin an attempt at the end of the event, or as soon as it may after that."""
        op = self._table.in_flight[each.seq]
        epoch = self._enter(op, each.epoch.stamp)
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
        if op.leaving or not self._group.lanes.may_begin(op.seq):
            return False
        if self._results.has_room:
            return True
        under_way = (each for each in self._table.in_flight.values() if each.running)
        return all(each.ended or each.seq > op.seq for each in under_way)

    def _begin(self, op: Op, epoch: GroupEpoch) -> None:
        if others := op.calls.keys() - epoch.record.sessions:
            self._refuse_others(op, others, epoch)
        if not op.agrees():
            return  # its ranks will hear of a verdict
        runner = epoch.runner
        op.began_at = monotonic()
        try:
            runner.prepare(op, self._watermark)
        except Exception as error:
            log.exception("op %d cannot be run", op.seq)
            self.cannot_run(op.seq, error, op.stamp)
            return
        if op.executor is None:  # all of it is here, and nothing can go wrong any more
            self._group.agreement.completed(op.seq, op.stamp, -1)
        else:
            self._add_due(self._group.edges.resume_all)
            self._add_due(runner.start(op))

    def refuse_calls(self, seq: int, sessions: Collection[str], current: GroupEpoch) -> None:
        """Fail the calls of ranks that have left, of an op that nobody has begun.

        Args:
            current: the newest epoch.
        """
        op = self._table.in_flight.get(seq)
        if op is not None and not op.ended and not op.leaving:
            self._refuse_others(op, op.calls.keys() & sessions, current)

    def _refuse_others(self, op: Op, sessions: Collection[str], epoch: GroupEpoch) -> None:
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
        self._add_due(self._group.edges.resume_all)  # those of the attempt go nowhere now
        waiting = [each for each in self._waiting if each[0] is op]
        for each in waiting:
            self._waiting.remove(each)
        op.next_step = None
        if op.result is not None:
            op.result.release()
            op.result, op.is_fetched = None, False
        if waiting:
            return
        if op.leaving:  # what was prepared since has not begun
            op.forget_attempt()
            return
        op.leaving = True
        self._stop(op, forward)

    def _free(self, op: Op) -> None:
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
        """Do something without the lock, as soon as no attempt uses the ranks' memory."""
        if op.leaving:
            op.next_step = partial(self._add_due, action)
        else:
            self._add_due(action)

    def _stop(self, op: Op, forward: bool) -> None:
        """Stop the attempt of an op; wakes those that wait for it."""
        free = partial(self._group.event, partial(self._free, op))
        self._group.epoch_table.of(op.stamp).runner.cancel(op, free, forward=forward)

    def _enter(self, op: Op, stamp: Stamp) -> GroupEpoch:
        """Move an op into the epoch of a stamp; return that."""
        epoch = self._group.epoch_table.take_in(self._group.agreement.machine.epochs[stamp])
        epoch.enter(op, self._group.epoch_table.by_ordinal)
        return epoch

    def _watermark(self) -> int:
        """Return the last op up to which all are final on this node."""
        return self._group.agreement.machine.watermark

    def fetch(self, each: Fetch) -> None:
        """Get the result from a node that has it."""
        op = self._table.in_flight[each.seq]
        epoch = self._enter(op, each.stamp)
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
            # Held before it is written: the writer gives up the op's own hold.
            self._results.keep(op)
            self._do_once_free(op, partial(self._writer.write, op))

    def refuse(self, each: Refuse) -> None:
        """Send the error to the local ranks that have called; who calls later is told then."""
        op = self._table.in_flight.get(each.seq)
        if op is None:
            # Of which it failed is known now, and maybe this node is to report it.
            self._outcomes.failures.append(FailedOp(each.seq, unpacked(each.error), ()))
            return
        if op.ended:
            return
        op.ended, op.error = True, unpacked(each.error)
        op.ordinal = each.ordinal
        self._add_due(self._group.edges.resume_all)
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
        self._add_due(self._group.edges.resume_all)  # frames of it go nowhere now
        if current.change:
            op.error, op.ordinal = unpacked(current.change), current.ordinal
            self._do_once_free(op, partial(self._outcomes.refuse, op))
        else:
            self._once_free(op, lambda: self._outcomes.retire(op))

    def fail(self, op: Op, error: AllfoldError) -> None:
        """Give up an op that has no outcome, whatever was agreed upon."""
        if op.ended:
            return
        # First: it drops the op's next step, which the refusal below may become.
        self.cancel(op.seq)
        op.ended, op.error = True, error
        self._do_once_free(op, partial(self._outcomes.refuse, op))

    # How attempts go

    def completed(self, seq: int, stamp: Stamp, floor: int) -> None:
        """Note that an attempt is done, and that ops up to ``floor`` are final on all nodes."""
        self._group.event(partial(self._group.agreement.completed, seq, stamp, floor))

    def end(self, op: Op, error: Exception | None) -> None:
        """End an op whose results are written to the local ranks, or could not be.

        If they could not, these ranks leave the group, as those of other nodes have the result.
        """
        has_others = (
            error is not None and len(self._group.epoch_table.of(op.stamp).record.nodes) > 1
        )
        self._outcomes.end(op, error)
        if has_others:
            for session in op.calls:
                self._group.rank_ended(session, f"could not be given the result of op {op.seq}")

    def cannot_run(self, seq: int, error: Exception, stamp: Stamp | None = None) -> None:
        """Ask for a verdict on an op, or one attempt, of which this node cannot do its part."""
        refusal = (
            error
            if isinstance(error, PeerRefused | PeerSentIncoherentTensor)
            else breakdown(self._group.name, self._group.node, seq, error)
        )
        self.doubt([Doubt(seq, Reason.FAILED, error=packed(refusal), stamp=stamp)])

    def mismatch(self, seq: int) -> None:
        """The calls of two ranks differ: have the op judged."""
        self.doubt([Doubt(seq, Reason.MISMATCH)])

    def doubt(self, doubts: list[Doubt]) -> None:
        """Ask for a verdict on ops that cannot go on."""
        if doubts and self._group.evicted is None:
            self._group.event(partial(self._group.agreement.doubt, doubts))

    # Frames

    def is_stale(self, seq: int, stamp: int) -> bool:
        """Return True for a frame of an attempt that is over here, or was given up.

        A frame of an attempt that is not known here yet is not stale: the other nodes are ahead.
        """
        if self._group.evicted is not None:
            return True
        if stamp > self._group.current.packed_stamp:
            return False
        expected = self._group.agreement.machine.expected_stamp(seq)
        return expected is None or stamp < expected.pack()

    def receiver(self, op: Op, source: str) -> OpReceiver | None:
        """The receiver of a running op's frames from a node; ``None`` if it has none."""
        return self._group.epoch_table.of(op.stamp).runner.receiver(op, source)

    # What pings carry

    def progress(self, node: str) -> tuple[int, int, int]:
        """This node's watermark, its oldest open op and the digest of that, as frames have it."""
        with self._table.lock:
            open_ops = (op for op in self._table.in_flight.values() if op.running and not op.ended)
            op = min(open_ops, key=lambda each: each.seq, default=None)
            if op is None or node not in self._group.epoch_table.of(op.stamp).record.nodes:
                return self._watermark(), -1, 0
            return self._watermark(), op.seq, self._digest(op, self._group.node, node)

    def learn_progress(self, node: str, watermark: int, seq: int, digest: int) -> None:
        """Another node has said how far it is; a call that differs from ours is a mismatch."""
        if self._group.evicted is not None:
            return
        self._group.event(partial(self._group.agreement.learn_watermark, node, watermark))
        with self._table.lock:
            op = self._table.in_flight.get(seq)
            differs = (
                op is not None
                and op.running
                and not op.ended
                and node in self._group.epoch_table.of(op.stamp).record.nodes
                and digest != self._digest(op, node, self._group.node)
            )
        if differs:
            self.mismatch(seq)

    def _digest(self, op: Op, giver: str, taker: str) -> int:
        plan = self._group.epoch_table.of(op.stamp).plan
        return op.digest(plan.ranks_on(giver), plan.ranks_on(taker))
