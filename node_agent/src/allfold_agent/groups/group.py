"""A group on this node: what its ranks hold as long as it lasts, over all epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from allfold_agent.execution.op import Arrival, Op, RankEndpoint
from allfold_agent.groups.epoch import Epoch, NodeResources
from allfold_agent.groups.group_edges import GroupEdges
from allfold_agent.groups.op_table import OpTable
from allfold_agent.groups.outcomes import Outcomes, refuse
from allfold_core.errors import AllfoldError, InvalidArgument, PeerLost, ServiceError
from allfold_core.plan import Plan
from allfold_core.wire.local_wire import (
    MAX_OPEN_MESSAGES,
    MAX_OPEN_OPS,
    OpMessage,
    P2PMessage,
)

log = logging.getLogger(__name__)

DEADLINE_RETRY_SECONDS = 1.0
INCIDENTS_AT_ONCE = 8


class FailureReporter(Protocol):
    """Finds out, with the other nodes, why an op does not go on."""

    def suspect(self, group: Group, seq: int, reason: str, waited: float = 0.0) -> None:
        """An op looks wrong; called from any thread, must not wait."""

    def report_lost(self, epoch: Epoch, error: PeerLost) -> None:
        """A rank or node of the epoch is gone; called from any thread, must not wait."""


class Group:
    """The calls of the local ranks, numbered over all epochs, and the epochs that serve them.

    An op is run in the epoch that was the newest when its first local rank called it, of those
    that begin with it or before. :meth:`install` takes in an epoch; it may be called again, from
    any thread.

    Args:
        plan: of the first epoch.
        resources: of this node.
        failures: finds out why an op does not go on.

    Attributes:
        opening: tells this opening of the name from others: the number of the first epoch.
        epochs: by number, the newest last. Replaced as a whole and never changed, so that every
            thread may look through it without the lock.
        current: the newest epoch.
        edges: to and from the other nodes, over all epochs.
        p2p: the sends and receives, which know ranks by their numbers in the first epoch.
        deferred: (session, seq) of calls that wait for the GPU of their rank, and have not arrived.
    """

    def __init__(self, plan: Plan, resources: NodeResources, failures: FailureReporter) -> None:
        self.name = plan.group
        self.opening = plan.epoch
        self.node = resources.node
        self.epochs: dict[int, Epoch] = {}
        self.table = OpTable()
        self.outcomes = Outcomes(self.name, self.node, self.table, self._cancel)
        self.deferred: set[tuple[str, int]] = set()
        self._called: dict[str, int] = {}
        self._resources = resources
        self._failures = failures
        self._seats = {session: number for number, session in enumerate(plan.sessions)}
        self._nodes = GroupEdges(plan, self, resources, failures.report_lost)
        self.edges, self.p2p = self._nodes.ops, self._nodes.p2p
        self.serve_edge = self._nodes.serve
        self.current = self.install(plan, first_seq=0)

    # Epochs

    def install(self, plan: Plan, first_seq: int | None = None) -> Epoch:
        """Take in the plan of a newer epoch, in which later ops are run.

        Ops that have begun go on in their own epoch. The edges stay as they are; frames that have
        waited for the epoch go on.

        Args:
            first_seq: the first op of the epoch; by default the one after the last that any local
                rank has called.

        Raises:
            InvalidArgument: the plan is another group's, or not newer than the current one.
        """
        with self.table.lock:
            newest = max(self.epochs, default=-1)
            if plan.group != self.name or plan.epoch <= newest:
                raise InvalidArgument(
                    f"the plan of group '{plan.group}' epoch {plan.epoch} cannot follow epoch "
                    f"{newest} of group '{self.name}'"
                )
            if first_seq is None:
                first_seq = max(self._called.values(), default=-1) + 1
            epoch = Epoch(
                plan,
                len(self.epochs),
                first_seq,
                self._resources,
                numbers=self._seats,
                table=self.table,
                outcomes=self.outcomes,
                ops=self,
                edges=self.edges,
                p2p=self.p2p,
            )
            self._nodes.add_members(plan)
            for each in self.epochs.values():
                each.superseded = True
            self.epochs = {**self.epochs, plan.epoch: epoch}
            self.current = epoch
            self.table.changed.notify_all()
        self.edges.resume_all()
        return epoch

    def epoch_of(self, seq: int) -> Epoch:
        """The epoch in which an op runs, or would run if it began now."""
        op = self.table.in_flight.get(seq)
        if op is not None:
            return self.epochs[op.epoch]
        current = self.current
        if seq >= current.first_seq:
            return current
        newest_first = reversed(self.epochs.values())
        return next((each for each in newest_first if each.first_seq <= seq), current)

    def epoch_with(self, session: str) -> Epoch | None:
        """The newest epoch in which a local session has a rank; ``None`` if it is in none."""
        newest_first = reversed(self.epochs.values())
        return next((each for each in newest_first if each.has(session)), None)

    def last_called(self, epoch: Epoch) -> dict[int, int]:
        """The last op that each rank of this node has called, by its number in an epoch."""
        before, sessions = epoch.first_seq - 1, epoch.sessions()
        return {
            rank: self._called.get(sessions[rank], before) if rank in sessions else before
            for rank in epoch.ranks
        }

    @property
    def waiting(self) -> bool:
        """True while a local rank waits for anything, so that deadlines must be watched."""
        return bool(self.table.in_flight) or self.p2p.waiting

    # Calls of the local ranks

    def submit(
        self,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None = None,
    ) -> None:
        """Take in a local rank's call; the op starts with the last one.

        Args:
            session: whose call it is.
            number: what the rank calls the group.
            called: when it called, if that was not just now (monotonic).
        """
        try:
            while not self._submit(session, connection, number, message, called):
                log.debug("op %d of group '%s': an epoch came meanwhile", message.seq, self.name)
        except Exception as error:
            log.exception("op %d of group '%s' cannot be run", message.seq, self.name)
            self.cannot_run(message.seq, error)

    def _submit(
        self,
        session: str,
        connection: RankEndpoint,
        number: int,
        message: OpMessage,
        called: float | None,
    ) -> bool:
        """Return False if the op belongs to another epoch by now, in which it has to be called."""
        seq = message.seq
        epoch = self.epoch_of(seq)
        try:
            rank = epoch.rank_of(session)
            self._check_room(rank, seq)
            spec = epoch.spec_of(message)
            source = connection.place(message.source, spec.input_bytes[rank])
            target = connection.place(message.target, spec.output_bytes[rank])
        except ValueError as error:
            refusal = error if isinstance(error, AllfoldError) else InvalidArgument(str(error))
            refuse(connection, number, seq, refusal, epoch.ordinal)
            self.abandon(session, seq, refusal)
            return True
        except Exception as error:
            # It is not among those that called, so no verdict on the op would reach it.
            breakdown = self._cannot_be_done(seq, repr(error))
            refuse(connection, number, seq, breakdown, epoch.ordinal)
            self.fail(seq, breakdown)
            raise
        now = monotonic()
        arrival = Arrival(
            rank, connection, number, message, spec, source, target, now, called or now
        )
        with self.table.lock:
            if self.epoch_of(seq) is not epoch:  # an epoch was installed meanwhile
                return False
            failure = self.failure(seq) or self._repetition(session, rank, seq)
            self._called[session] = max(self._called.get(session, -1), seq)
            op = None if failure else self._arrive(epoch, arrival)
        if failure:
            refuse(connection, number, seq, failure, epoch.ordinal)
        elif op is not None:
            epoch.runner.start(op)
            self.edges.resume_all()
        return True

    def submit_message(
        self, session: str, connection: RankEndpoint, number: int, message: P2PMessage
    ) -> None:
        """Take in a local rank's send or receive."""
        epoch, open_calls = self.current, self.p2p.open_calls
        try:
            rank = epoch.rank_of(session)
        except InvalidArgument as error:
            refuse(connection, number, message.seq, error, message.view)
            return
        if open_calls >= MAX_OPEN_MESSAGES * len(epoch.ranks):
            excess = InvalidArgument(
                f"rank {rank} sends or receives in group '{self.name}' while {open_calls} messages "
                "of its node are in flight, the most there may be; wait for some of them first"
            )
            refuse(connection, number, message.seq, excess, message.view)
            return
        self.p2p.submit(epoch.seats[rank], connection, number, message, epoch.seats)

    def _cannot_be_done(self, seq: int, why: str) -> ServiceError:
        return ServiceError(
            f"op {seq} of group '{self.name}' failed: node {self.node}: {why}; the log of that "
            "node says more",
            seq=seq,
            group=self.name,
        )

    def _repetition(self, session: str, rank: int, seq: int) -> InvalidArgument | None:
        """The refusal of a second call of one op, which must not count as another rank's."""
        if seq > self._called.get(session, -1):
            return None
        return InvalidArgument(f"rank {rank} has called op {seq} of group '{self.name}' before")

    def _check_room(self, rank: int, seq: int) -> None:
        """Refuse one op too many of a rank that does not wait for its ops.

        The rank that is ahead of the others has called every op in flight.
        """
        table = self.table.in_flight
        if len(table) >= MAX_OPEN_OPS and seq not in table:
            raise InvalidArgument(
                f"rank {rank} calls op {seq} of group '{self.name}' while {len(table)} ops are in "
                "flight, the most there may be; wait for some of them first"
            )

    def abandon(self, session: str, seq: int, refusal: AllfoldError) -> None:
        """Fail an op of which a rank's call was refused: the rank will not call it again.

        Here at once: when the rank has called later ops, this one would count as done.
        """
        has_called = seq <= self._called.get(session, -1)
        if has_called or not self.epoch_of(seq).has(session) or self.failure(seq):
            return
        log.warning("a call of op %d of group '%s' is refused: %s", seq, self.name, refusal.message)
        self.fail(seq, self._cannot_be_done(seq, refusal.message))
        self.cannot_run(seq, refusal)

    def _arrive(self, epoch: Epoch, arrival: Arrival) -> Op | None:
        """Record an arrival; return the op if it is complete and may start."""
        seq = arrival.message.seq
        op = self.table.in_flight.get(seq)
        if op is None:
            members = epoch.plan.world_size
            op = Op(seq, epoch.number, epoch.ranks, epoch.stamp, epoch.ordinal, members)
            self.table.in_flight[seq] = op
        op.add(arrival)
        if not op.agrees():
            self.suspect(seq, "mismatch")
        elif op.is_complete:
            epoch.runner.prepare(op)
        self.table.changed.notify_all()
        return op if op.running else None

    def await_arrivals(self, seq: int, wait: float) -> None:
        """Return once every local rank has called the op or it is over, or after ``wait`` s."""

        def settled() -> bool:
            op = self.table.in_flight.get(seq)
            if op is not None:
                return op.ended or op.is_complete
            return self.failure(seq) is not None or self._succeeded(seq)

        with self.table.lock:
            self.table.changed.wait_for(settled, timeout=wait)

    # Outcomes of ops that run

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; return False if it has failed before."""
        return self.outcomes.settle(op)

    def end(self, op: Op, error: Exception | None) -> None:
        """The results are written to the local ranks, or could not be."""
        self.outcomes.end(op, error)

    def cannot_run(self, seq: int, error: Exception) -> None:
        """This node cannot do its part: no other one can finish the op either."""
        reason = error.message if isinstance(error, AllfoldError) else repr(error)
        self.suspect(seq, f"failed: node {self.node}: {reason}")

    def suspect(self, seq: int, reason: str) -> None:
        """Have an op judged."""
        self._failures.suspect(self, seq, reason)

    # Failures

    def failure(self, seq: int) -> AllfoldError | None:
        """Return why an op has failed, or can only fail; ``None`` if it may still succeed."""
        with self.table.lock:
            return self.failure_so_far(seq)

    def failure_so_far(self, seq: int) -> AllfoldError | None:
        """Like :meth:`failure`, without waiting for the lock; may miss what changes meanwhile.

        For those who look again soon. An op may be compiled while the lock is held.
        """
        return self.outcomes.of(seq) or self.epoch_of(seq).failure(seq)

    def fail(self, seq: int, error: AllfoldError, *, final: bool = True) -> bool:
        """Apply a verdict: the op fails for the ranks that wait, and for those still to call.

        Returns:
            True if the op has failed here; False if it is done, or, unless the verdict is final,
            if the ranks that it calls missing have called meanwhile.
        """
        with self.table.lock:
            op = self.table.in_flight.get(seq)
            if self.failure(seq):
                return True
            if (op is not None and op.ended) or self._succeeded(seq):
                return False
            if op is not None and op.running and not final:
                return False
            self.outcomes.remember(seq, error)
            self.outcomes.forget_before(min(self.last_called(self.current).values()))
            if op is not None:
                self.outcomes.fail(op, error)
            self.table.changed.notify_all()
        self.edges.resume_all()
        return True

    def is_over(self, seq: int) -> bool:
        """Return True if an op that is not in flight has an outcome here, or can only fail."""
        return self.failure_so_far(seq) is not None or self._succeeded(seq)

    def _succeeded(self, seq: int) -> bool:
        if seq in self.table.in_flight or seq > max(self._called.values(), default=-1):
            return False
        return seq <= min(self.last_called(self.epoch_of(seq)).values())

    def _cancel(self, op: Op, then_report: Callable[[], None]) -> None:
        self.epochs[op.epoch].runner.cancel(op, then_report)

    def overdue(self, now: float) -> list[tuple[Op, str]]:
        """The ops that need a verdict: past their deadline, or first in line and stalled.

        The ops behind the first one wait for it. To look into hundreds of them would keep the
        nodes too busy to answer.
        """
        with self.table.lock:
            waiting = [op for op in self.table.in_flight.values() if not op.ended]
            late = [op for op in waiting if now >= op.next_deadline][:INCIDENTS_AT_ONCE]
            for op in late:
                op.next_deadline = now + DEADLINE_RETRY_SECONDS
            if waiting and not late and waiting[0].has_stalled(now):
                return [(waiting[0], "stall")]
            return [(op, "deadline") for op in late]

    def expire_messages(self, now: float) -> None:
        """Fail sends and receives that are past their deadline."""
        self.p2p.expire(now)

    def finish_messages(self, deadline: float) -> None:
        """Let peers get the messages and acknowledgements that they are owed, until a deadline."""
        self.p2p.finish(deadline)

    def close(self, linger: float) -> None:
        """End the group on this node, after the peers have got what they are still owed."""
        self._nodes.close(linger)
