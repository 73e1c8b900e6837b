"""Runs the ops of one group that every local rank has called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from allfold_agent.buffers import BufferPool
from allfold_agent.compiling import Compiled, Compiler
from allfold_agent.contracts import Contract
from allfold_agent.dataflow import Task
from allfold_agent.edges import Edges
from allfold_agent.exchange import Exchange
from allfold_agent.job import Job
from allfold_agent.op import INLINE_BYTES, Op, over_pieces
from allfold_agent.outgoing import Outgoing
from allfold_agent.residuals import Residual, Residuals
from allfold_agent.workers import WorkerPool
from allfold_core.parts import Part
from allfold_core.plan import Plan

# Less is handed out when all of it is there: at once.
EARLY_BYTES = 256 * 1024


class Outcomes(Protocol):
    """Who decides on the outcome of ops: the group."""

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; false where it has failed before."""

    def tell_end(self, op: Op, error: Exception | None) -> None:
        """Every local rank has its result, or this node failed to give it to them."""

    def cannot_run(self, seq: int, error: Exception) -> None:
        """This node cannot do its part of an op."""


class Runner:
    """Prepares and starts ops, and hands out their results.

    Args:
        plan: of the group.
        me: this node's index.
        edges: to the other nodes.
        outcomes: told when an op may end, and when it has.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        workers: WorkerPool,
        buffers: BufferPool,
        edges: Edges,
        outcomes: Outcomes,
    ) -> None:
        self.plan = plan
        self.me = me
        self.ranks = plan.members[me].ranks
        self._workers = workers
        self._buffers = buffers
        self._edges = edges
        self._outcomes = outcomes
        self._placement = tuple(member.ranks for member in plan.members)
        self._residuals = Residuals()
        self._compiler = Compiler(plan, me)

    def prepare(self, op: Op) -> None:
        """Set an op up while the order of ops is locked; :meth:`start` sets it going."""
        contract = op.contract
        op.strategy = contract.strategy
        callers = self.ranks if contract.is_exchange else self.ranks[:1]
        calls = tuple(op.arrivals[rank].contract for rank in callers)
        op.compiled = compiled = self._compiler.compile(calls)
        elements, arrivals = compiled.arithmetic.elements, op.arrivals.items()
        op.job = Job(
            compiled.layout,
            compiled.arithmetic,
            {rank: elements(arrival.source) for rank, arrival in arrivals},
            {rank: elements(arrival.target) for rank, arrival in arrivals},
            contract.wire,
            self._residual(contract, compiled),
        )
        if len(self.plan.members) > 1:
            op.exchange = self._prepare_exchange(op, op.job, compiled)
        op.running = True

    def _residual(self, contract: Contract, compiled: Compiled) -> Residual | None:
        series = contract.fingerprint.feedback
        if not series:
            return None
        held, dtype = compiled.layout.held, compiled.arithmetic.kept_dtype
        return self._residuals.of(series, held, dtype)

    def _prepare_exchange(self, op: Op, job: Job, compiled: Compiled) -> Exchange:
        flow = compiled.flow
        exchange = Exchange(
            flow,
            job,
            self._buffers,
            on_sendable=self._edges.kick,
            on_receivable=self._edges.resume,
            on_finished=lambda: self._distribute(op, job, compiled, exchange),
            on_failed=lambda error: self._outcomes.cannot_run(op.seq, error),
            early=compiled.copy_bytes > EARLY_BYTES and job.outputs_are_no_inputs(),
        )
        for destination in flow.sends:
            digest = op.digest(self.ranks, self._placement[destination])
            self._edges.out(destination).enqueue(Outgoing(exchange, destination, op.seq, digest))
        for source in flow.receives:
            self._edges.open_in(source)
        return exchange

    # Running

    def start(self, op: Op) -> None:
        """Set a prepared op going."""
        assert op.job is not None and op.compiled is not None
        if op.exchange is None:
            self._fold_locally(op, op.job, op.compiled)
            return
        exchange = op.exchange
        contributions = exchange.start()
        size = sum(task.stop - task.start for task in contributions)
        inline = size * op.job.arithmetic.kept_itemsize * len(self.ranks) <= INLINE_BYTES
        for task in contributions:
            if inline:
                exchange.contribute(task)
            else:
                self._workers.submit(_contribution(exchange, task))

    def _fold_locally(self, op: Op, job: Job, compiled: Compiled) -> None:
        # With every rank here nothing can fail the op any more, and no verdict may tell the ranks
        # that their memory is theirs again while workers write to it.
        if not self._outcomes.settle(op):
            return
        over_pieces(
            compiled.wholes,
            job.arithmetic.itemsize,
            compiled.fold_bytes,
            self._workers,
            job.fold_locally,
            lambda error: self._outcomes.tell_end(op, error),
        )

    def _distribute(self, op: Op, job: Job, compiled: Compiled, exchange: Exchange) -> None:
        """Every task is done: copy to the local ranks what they do not have yet."""
        if not self._outcomes.settle(op):
            return

        def finish(error: Exception | None) -> None:
            exchange.release()
            self._outcomes.tell_end(op, error)

        def copy(part: Part, start: int, stop: int) -> None:
            job.hand_out(part, start, stop, exchange.range(start, stop))

        over_pieces(
            compiled.rest if exchange.early else compiled.results,
            job.arithmetic.kept_itemsize,
            0 if exchange.early and not compiled.rest else compiled.copy_bytes,
            self._workers,
            copy,
            finish,
        )


def _contribution(exchange: Exchange, task: Task) -> Callable[[], None]:
    return lambda: exchange.contribute(task)
