"""The attempts of a group's ops on this node, as those who run them see the group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from allfold_agent.edges.edges import Edges
from allfold_agent.execution.op import Op
from allfold_agent.execution.op_edges import OpReceiver
from allfold_agent.groups.agreement import Agreement
from allfold_agent.groups.epoch import Epoch, EpochTable
from allfold_agent.groups.op_runs import OpRuns
from allfold_agent.groups.outcomes import Outcomes, breakdown
from allfold_core.errors import PeerLost, PeerRefused, PeerSentIncoherentTensor
from allfold_core.survival.judge import packed
from allfold_core.survival.records import Stamp
from allfold_core.survival.reports import Doubt, Reason


class OpAttempts(ABC):
    """Tells the agreement of a group how the attempts of its ops go on this node.

    Attributes:
        edges: to and from the other nodes, over all epochs.
        event: lets the agreement know something, and does what follows from it.
        current: the newest epoch.
        evicted: the error of every call, once the group has gone on without this node.
        epoch_table: all epochs that anything can name.
    """

    name: str
    node: str
    edges: Edges
    event: Callable[[Callable[[], None]], None]
    current: Epoch
    evicted: PeerLost | None
    epoch_table: EpochTable
    agreement: Agreement
    outcomes: Outcomes
    runs: OpRuns

    @abstractmethod
    def rank_ended(self, session: str, how: str, *, withdraws: bool = False) -> None:
        """Remove a local rank that is dead or has left; ``how`` is a phrase to follow its name."""

    def watermark(self) -> int:
        """Return the last op up to which all are final on this node."""
        return self.agreement.machine.watermark

    def enter(self, op: Op, stamp: Stamp) -> Epoch:
        """Have an op run in the epoch of a stamp; returns that."""
        epoch = self.epoch_table.take_in(self.agreement.machine.epochs[stamp])
        epoch.enter(op, self.epoch_table.by_ordinal)
        return epoch

    def resume_frames(self) -> None:
        """Receive frames again that waited for an op, because one has begun."""
        self.edges.resume_all()

    def cancel(self, op: Op, forward: bool) -> None:
        """Stop the attempt of an op; wakes those that wait for it."""
        free = partial(self.event, partial(self.runs.free, op))
        self.epoch_table.of(op.stamp).runner.cancel(op, free, forward=forward)

    def completed(self, seq: int, stamp: Stamp, floor: int) -> None:
        """Note that an attempt is done, and that ops up to ``floor`` are final on all nodes."""
        self.event(partial(self.agreement.completed, seq, stamp, floor))

    def take_completion(self, seq: int, stamp: Stamp) -> None:
        """Note that an attempt is done but for writing its result; with the lock held."""
        self.agreement.completed(seq, stamp, -1)

    def take_result(self, seq: int, stamp: Stamp) -> None:
        """Note that the result of an op was fetched, or cannot be. With the table's lock held."""
        self.agreement.fetched(seq, stamp)

    def end(self, op: Op, error: Exception | None) -> None:
        """End an op whose results are written to the local ranks, or could not be.

        If they could not, these ranks leave the group, as those of other nodes have the result.
        """
        has_others = error is not None and len(self.epoch_table.of(op.stamp).record.nodes) > 1
        self.outcomes.end(op, error)
        if has_others:
            for session in op.calls:
                self.rank_ended(session, f"could not be given the result of op {op.seq}")

    def cannot_run(self, seq: int, error: Exception, stamp: Stamp | None = None) -> None:
        """Have an op judged of which this node cannot do its part, or only not in one attempt."""
        refusal = (
            error
            if isinstance(error, PeerRefused | PeerSentIncoherentTensor)
            else breakdown(self.name, self.node, seq, error)
        )
        self.doubt([Doubt(seq, Reason.FAILED, error=packed(refusal), stamp=stamp)])

    def mismatch(self, seq: int) -> None:
        """The calls of two ranks differ: have the op judged."""
        self.doubt([Doubt(seq, Reason.MISMATCH)])

    def doubt(self, doubts: list[Doubt]) -> None:
        """Have ops judged that cannot go on."""
        if doubts and self.evicted is None:
            self.event(partial(self.agreement.doubt, doubts))

    # Frames

    def is_stale(self, seq: int, stamp: int) -> bool:
        """Return True for a frame of an attempt that is over here, or was given up.

        A frame of an attempt that is not known here yet is not stale: the other nodes are ahead.
        """
        if self.evicted is not None:
            return True
        if stamp > self.current.packed_stamp:
            return False
        expected = self.agreement.machine.expected_stamp(seq)
        return expected is None or stamp < expected.pack()

    def receiver(self, op: Op, source: str) -> OpReceiver | None:
        """The receiver of a running op's frames from a node; ``None`` if it has none."""
        return self.epoch_table.of(op.stamp).runner.receiver(op, source)
