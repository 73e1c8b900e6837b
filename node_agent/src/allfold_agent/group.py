"""One epoch of one group on this node: its ops, its edges, and what became of its peers."""

from __future__ import annotations

import logging
from collections import deque
from threading import Condition, RLock
from time import monotonic
from typing import Protocol

from allfold_agent.buffers import BufferPool
from allfold_agent.contracts import Contract, Contracts
from allfold_agent.edge_request import Lane
from allfold_agent.edges import DialFrom, Edges
from allfold_agent.exchange import Exchange
from allfold_agent.fates import Fates
from allfold_agent.gpu.pins import Pins
from allfold_agent.op import Arrival, Op, RankConnection
from allfold_agent.out_edge import OutEdge
from allfold_agent.pairs import Pairs
from allfold_agent.reactor import Reactor
from allfold_agent.records import OpRecord, record
from allfold_agent.runner import Runner
from allfold_agent.workers import WorkerPool
from allfold_core.choose import choose
from allfold_core.errors import AllfoldError, InvalidArgument, PeerLost, ServiceError
from allfold_core.frames import FrameHeader
from allfold_core.local_wire import Message, OpMessage, check_timeout, pack_outcome
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.verdict import name_ranks

log = logging.getLogger(__name__)

DEADLINE_RETRY_SECONDS = 1.0
CASES_AT_ONCE = 8
RECORDED_OPS = 512
LOCAL = "local"


class Detective(Protocol):
    """Who finds out, with the other nodes, why an op does not go on."""

    def suspect(self, group: Group, seq: int, reason: str, waited: float = 0.0) -> None:
        """An op looks wrong; called from any thread, must not wait."""

    def report_lost(self, group: Group, error: PeerLost) -> None:
        """A rank or node of the group is gone; called from any thread, must not wait."""


class Group:
    """The ops of one group epoch on this node.

    Args:
        dial: opens an edge: ``dial(plan, source, destination, lane)(from_frame)``.
        reactor: reads the short frames of other nodes.
        pins: memory of the host that GPUs reach.
    """

    def __init__(
        self,
        plan: Plan,
        node: str,
        *,
        workers: WorkerPool,
        buffers: BufferPool,
        detective: Detective,
        dial: DialFrom,
        reactor: Reactor,
        pins: Pins,
    ) -> None:
        self.plan = plan
        self.me = plan.index_of_node(node)
        self.ranks = plan.members[self.me].ranks
        self.ops: dict[int, Op] = {}
        self.recent: deque[OpRecord] = deque(maxlen=RECORDED_OPS)
        self.last_seq = dict.fromkeys(self.ranks, -1)
        self.fates = Fates(plan.group)
        # (rank, seq) of calls that wait for the GPU of their rank, and have not arrived so far.
        self.held: set[tuple[int, int]] = set()
        self._detective = detective
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self.edges = Edges(plan, self.me, dial, self, reactor)
        self.pairs = Pairs(plan, self.me, dial, workers, buffers, self.edge_lost, reactor)
        self._closing = False
        self._closed = False
        self._contracts = Contracts(plan, self.me)
        self._runner = Runner(plan, self.me, workers, buffers, self.edges, self, pins)

    @property
    def name(self) -> str:
        return self.plan.group

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    @property
    def waiting(self) -> bool:
        """Whether a local rank waits for anything, so that deadlines must be watched."""
        return bool(self.ops) or self.pairs.waiting

    # Calls of the local ranks

    def submit(
        self,
        rank: int,
        connection: RankConnection,
        number: int,
        message: OpMessage,
        called: float | None = None,
    ) -> None:
        """A local rank has called an op; when it was the last one, the op starts.

        Args:
            called: when, if it was not just now (monotonic).
        """
        try:
            self._submit(rank, connection, number, message, called)
        except Exception as error:
            log.exception("op %d of group '%s' cannot be run", message.seq, self.name)
            self.cannot_run(message.seq, error)

    def _submit(
        self,
        rank: int,
        connection: RankConnection,
        number: int,
        message: OpMessage,
        called: float | None,
    ) -> None:
        try:
            contract = self._checked(message)
            source = connection.place(message.source, contract.input_bytes[rank])
            target = connection.place(message.target, contract.output_bytes[rank])
        except ValueError as error:
            refusal = error if isinstance(error, AllfoldError) else InvalidArgument(str(error))
            self._refuse(connection, number, message.seq, refusal)
            return
        except Exception as error:
            # It is not among those that called, so no verdict on the op would reach it.
            self._refuse(connection, number, message.seq, self._breakdown(message.seq, error))
            raise
        now = monotonic()
        arrival = Arrival(
            rank, connection, number, message, contract, source, target, now, called or now
        )
        with self._lock:
            failure = self.fates.of(message.seq) or self._repetition(rank, message.seq)
            self.last_seq[rank] = max(self.last_seq[rank], message.seq)
            op = None if failure else self._arrive(arrival)
        if failure:
            self._refuse(connection, number, message.seq, failure)
        elif op is not None:
            self._runner.start(op)
            self.edges.resume_all()

    def _breakdown(self, seq: int, error: Exception) -> ServiceError:
        node = self.plan.members[self.me].node
        return ServiceError(
            f"op {seq} of group '{self.name}' failed: node {node}: {error!r}; the log of that node "
            "has the traceback",
            seq=seq,
            group=self.name,
        )

    def cannot_run(self, seq: int, error: Exception) -> None:
        """This node cannot do its part: no other one can finish the op either."""
        node = self.plan.members[self.me].node
        self._detective.suspect(self, seq, f"failed: node {node}: {error!r}")

    def _repetition(self, rank: int, seq: int) -> InvalidArgument | None:
        """The refusal of a second call of one op, which must not count as another rank's."""
        if seq > self.last_seq[rank]:
            return None
        return InvalidArgument(f"rank {rank} has called op {seq} of group '{self.name}' before")

    def _checked(self, message: OpMessage) -> Contract:
        """The terms of a call; ``ValueError`` says what is wrong with it."""
        check_timeout(message.timeout)
        contract = self._contracts.of(message.fingerprint)
        itemsize = contract.fingerprint.dtype.itemsize
        if message.source.offset % itemsize or message.target.offset % itemsize:
            raise InvalidArgument(
                f"a {contract.fingerprint.dtype.label} cannot lie at byte "
                f"{message.source.offset} or {message.target.offset}"
            )
        return contract

    def _arrive(self, arrival: Arrival) -> Op | None:
        """Record an arrival; returns the op if it is complete and may start."""
        op = self.ops.get(arrival.message.seq)
        if op is None:
            op = self.ops[arrival.message.seq] = Op(arrival.message.seq)
        op.add(arrival)
        complete = len(op.arrivals) == len(self.ranks)
        if not op.agrees():
            self._detective.suspect(self, op.seq, "mismatch")
        elif complete:
            self._runner.prepare(op)
        self._changed.notify_all()
        return op if op.running else None

    def await_arrivals(self, seq: int, wait: float) -> None:
        """Return once every local rank has called the op or it is over, or after ``wait`` s."""

        def settled() -> bool:
            op = self.ops.get(seq)
            if op is not None:
                return op.ended or len(op.arrivals) == len(self.ranks)
            return self.fates.of(seq) is not None or self._succeeded(seq)

        with self._lock:
            self._changed.wait_for(settled, timeout=wait)

    def _refuse(
        self, connection: RankConnection, number: int, seq: int, error: AllfoldError
    ) -> None:
        connection.send(pack_outcome(Message.FAILED, number, seq, error.to_dict()))

    # Ends of ops

    def explain(self, kind: str, nbytes: int) -> str:
        """The strategy that is chosen for an op of a size; ``InvalidArgument`` for no kind."""
        found = next((each for each in Kind if each.label == kind), None)
        if found is None:
            known = ", ".join(each.label for each in Kind)
            raise InvalidArgument(f"{kind!r} is no collective; there are {known}")
        return LOCAL if len(self.plan.members) == 1 else choose(found, self.plan, nbytes)

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; false where it has failed before."""
        with self._lock:
            if op.ended:
                return False
            op.ended = True
            return True

    def tell_end(self, op: Op, error: Exception | None) -> None:
        """The local ranks have their result, or this node failed to give it to them."""
        if error is not None:
            log.error("op %d has no result for the ranks of this node", op.seq, exc_info=error)
            op.error = ServiceError(
                f"op {op.seq} of group '{self.name}': node {self.plan.members[self.me].node} "
                f"could not hand out the result: {error!r}; its log has the traceback",
                seq=op.seq,
                group=self.name,
            )
        with self._lock:
            self._retire(op)
        for arrival in op.arrivals.values():
            if op.error is None:
                outcome = pack_outcome(Message.DONE, arrival.group_number, op.seq)
                arrival.connection.send(outcome)
            else:
                self._refuse(arrival.connection, arrival.group_number, op.seq, op.error)

    def _retire(self, op: Op) -> None:
        self.ops.pop(op.seq, None)
        self.recent.append(record(op, self.ranks))

    # Edges

    def serve_edge(self, destination: int, lane: Lane) -> OutEdge:
        """The out-edge that another node has opened; ``PeerLost`` when the group is closed."""
        with self._lock:
            if self._closed:
                raise PeerLost(f"group '{self.name}' epoch {self.epoch} is closed on this node")
            if lane is Lane.PAIRS:
                return self.pairs.serve_edge(destination)
            return self.edges.out(destination)

    def sink_for(self, source: int, header: FrameHeader, seconds: float) -> Exchange | None:
        """The op of a frame from a node, ``None`` where it has failed.

        Raises:
            TimeoutError: the local ranks have not all called it within ``seconds``.
        """
        deadline = monotonic() + seconds
        with self._lock:
            while True:
                if self._closed or self.fates.of(header.seq):
                    return None
                op = self.ops.get(header.seq)
                if op is not None and op.running:
                    break
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(timeout=left):
                    raise TimeoutError
        if op.digest(self.plan.members[source].ranks, self.ranks) != header.fingerprint:
            self._detective.suspect(self, header.seq, "mismatch")
            return None
        return op.exchange

    def edge_lost(self, source: int, error: AllfoldError) -> None:
        """An in-edge is gone for good: so is its node, unless its ranks have left in order."""
        member = self.plan.members[source]
        with self._lock:
            if self._closing or all(rank in self.fates.left for rank in member.ranks):
                return
        log.warning("group '%s' has lost node %s: %s", self.name, member.node, error.message)
        # Every survivor finds this out by itself, so the message has only what is the same for all.
        self._detective.report_lost(
            self,
            PeerLost(
                f"node {member.node} of group '{self.name}' with {name_ranks(member.ranks)} "
                "cannot be reached any more",
                node=member.node,
                ranks=list(member.ranks),
                reason=error.message,
            ),
        )

    def incoherent(self, seq: int, error: AllfoldError) -> None:
        """A frame did not fit its op: find out whose fault it is."""
        log.error("%s", error)
        self._detective.suspect(self, seq, f"incoherent: {error.message}")

    # Outcomes that are no success

    def fail(self, seq: int, error: AllfoldError, *, final: bool = True) -> bool:
        """The verdict on an op: tell the ranks that wait, remember it for those still to come.

        Returns whether the op has failed here: not where it is done; nor, unless the verdict is
        final, where the ranks that it calls missing have called meanwhile.
        """
        with self._lock:
            op = self.ops.get(seq)
            if self.fates.of(seq):
                return True
            if (op is not None and op.ended) or self._succeeded(seq):
                return False
            if op is not None and op.running and not final:
                return False
            self.fates.fail(seq, error)
            self.fates.forget_before(min(self.last_seq.values()))
            if op is not None:
                self._fail_op(op, error)
            self._changed.notify_all()
        self.edges.resume_all()
        return True

    def failure(self, seq: int) -> AllfoldError | None:
        """Why an op has failed, or can only fail; ``None`` for one that may still succeed."""
        with self._lock:
            return self.fates.of(seq)

    def _succeeded(self, seq: int) -> bool:
        return seq not in self.ops and seq <= min(self.last_seq.values())

    def _fail_op(self, op: Op, error: AllfoldError) -> None:
        op.ended = True
        op.error = error

        def tell() -> None:
            for arrival in op.arrivals.values():
                self._refuse(arrival.connection, arrival.group_number, op.seq, error)

        self._retire(op)
        if op.exchange is None:
            tell()
            return
        op.exchange.fail(tell)
        op.exchange.release()
        for destination in op.exchange.flow.sends:
            self.edges.wake(destination)

    def break_(self, error: PeerLost) -> None:
        """The group has lost a member: fail what is in flight and whatever comes."""
        with self._lock:
            if self.fates.broken is None:
                self.fates.broken = error
                log.warning("group '%s' epoch %d is broken: %s", self.name, self.epoch, error)
            broken = self.fates.broken
            for op in [op for op in self.ops.values() if not op.ended]:
                self._fail_op(op, broken)
            self._changed.notify_all()
        self.edges.resume_all()
        self.pairs.break_(broken)

    def rank_left(self, rank: int, last_seq: int) -> None:
        """A rank has left in order: later ops, which would wait for it, fail."""
        with self._lock:
            self.fates.left[rank] = last_seq
            for op in list(self.ops.values()):
                error = self.fates.of(op.seq)
                if error and not op.ended:
                    self._fail_op(op, error)
            self._changed.notify_all()
        self.edges.resume_all()
        self.pairs.rank_left(rank)

    def overdue(self, now: float) -> list[tuple[Op, str]]:
        """The ops that need a detective: past their deadline, or first in line and stalled.

        The ops behind the first one wait for it. To look into hundreds of them would keep the
        nodes too busy to answer.
        """
        with self._lock:
            waiting = [op for op in self.ops.values() if not op.ended]
            late = [op for op in waiting if now >= op.next_deadline][:CASES_AT_ONCE]
            for op in late:
                op.next_deadline = now + DEADLINE_RETRY_SECONDS
            if waiting and not late and self._has_stalled(waiting[0], now):
                return [(waiting[0], "stall")]
            return [(op, "deadline") for op in late]

    @staticmethod
    def _has_stalled(first: Op, now: float) -> bool:
        """Whether the op could be done but is not, for longer each time that this is true."""
        if not first.running and first.agrees():
            return False  # it waits for local ranks
        first.stalled_since = first.stalled_since or now
        if now < first.stalled_since + first.patience:
            return False
        first.patience *= 2
        return True

    def close(self, linger: float) -> None:
        """End the group on this node, after the peers have got what they are still owed."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.edges.finish(monotonic() + linger)
        self.pairs.finish(monotonic() + linger)
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.edges.close()
        self.pairs.close()
