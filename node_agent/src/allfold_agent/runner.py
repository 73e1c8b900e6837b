"""Runs the ops of one group that every local rank has called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from allfold_agent.buffers import Buffer, BufferPool
from allfold_agent.compiling import Compiled, Compiler
from allfold_agent.contracts import Contract
from allfold_agent.dataflow import Task
from allfold_agent.edges import Edges
from allfold_agent.exchange import Exchange, HandOut
from allfold_agent.gpu.job import GpuJob
from allfold_agent.gpu.pins import Pins
from allfold_agent.job import Job
from allfold_agent.op import INLINE_BYTES, Op, over_pieces
from allfold_agent.outgoing import Outgoing
from allfold_agent.residuals import Residual, Residuals
from allfold_agent.workers import WorkerPool
from allfold_core.errors import GpuFailed
from allfold_core.parts import Part, Piece
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
        pins: memory of the host that GPUs reach.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        workers: WorkerPool,
        buffers: BufferPool,
        edges: Edges,
        outcomes: Outcomes,
        pins: Pins,
    ) -> None:
        self.plan = plan
        self.me = me
        self.ranks = plan.members[me].ranks
        self._workers = workers
        self._buffers = buffers
        self._edges = edges
        self._outcomes = outcomes
        self._pins = pins
        self._placement = tuple(member.ranks for member in plan.members)
        self._residuals = Residuals()
        self._compiler = Compiler(plan, me)

    def prepare(self, op: Op) -> None:
        """Set an op up while the order of ops is locked; :meth:`start` sets it going."""
        contract = op.contract
        op.strategy = contract.strategy
        callers = self.ranks if contract.is_exchange else self.ranks[:1]
        calls = tuple(op.arrivals[rank].contract for rank in callers)
        op.compiled = compiled = self._compiler.compile(calls, op.on_gpu)
        # Where a rank has its memory on a GPU, the CPU folds for none.
        elements: Callable[[Any], torch.Tensor] = compiled.arithmetic.elements
        arrivals = {} if op.on_gpu else op.arrivals
        op.job = Job(
            compiled.layout,
            compiled.arithmetic,
            {rank: elements(arrival.source) for rank, arrival in arrivals.items()},
            {rank: elements(arrival.target) for rank, arrival in arrivals.items()},
            contract.wire,
            self._residual(contract, compiled),
        )
        if op.on_gpu:
            op.gpu_job = self._gpu_job(op, compiled)
        if len(self.plan.members) > 1:
            op.exchange = self._prepare_exchange(op, op.job, compiled)
        op.running = True

    def _gpu_job(self, op: Op, compiled: Compiled) -> GpuJob:
        arrivals = op.arrivals.items()
        return GpuJob(
            compiled.layout,
            compiled.arithmetic,
            {rank: arrival.source_place() for rank, arrival in arrivals},
            {rank: arrival.target_place() for rank, arrival in arrivals},
            buffers=self._buffers,
            pins=self._pins,
            until=op.first_call + op.timeout,
        )

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
            early=compiled.copy_bytes > EARLY_BYTES and (op.gpu_job or job).outputs_are_no_inputs(),
            hand_out=self._on_gpu(op.gpu_job, lambda: exchange.buffer) if op.gpu_job else None,
        )
        for destination in flow.sends:
            digest = op.digest(self.ranks, self._placement[destination])
            self._edges.out(destination).enqueue(Outgoing(exchange, destination, op.seq, digest))
        for source in flow.receives:
            self._edges.open_in(source)
        return exchange

    def _on_gpu(self, job: GpuJob, buffer: Callable[[], Buffer]) -> HandOut:
        """How results get to ranks on GPUs, by another thread than that which received them."""

        def hand_out(pieces: Sequence[Piece], done: Callable[[Exception | None], None]) -> None:
            self._workers.submit(lambda: job.hand_out(pieces, buffer(), done))

        return hand_out

    # Running

    def start(self, op: Op) -> None:
        """Set a prepared op going."""
        assert op.job is not None and op.compiled is not None
        if op.exchange is None:
            if op.gpu_job is None:
                self._fold_locally(op, op.job, op.compiled)
            elif self._outcomes.settle(op):
                self._fold_on_gpu(op, op.gpu_job, op.compiled)
            return
        exchange = op.exchange
        contributions = exchange.start()
        if op.gpu_job is not None:
            self._workers.submit(partial(self._contribute, op.gpu_job, exchange, contributions))
            return
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

    def _fold_on_gpu(self, op: Op, job: GpuJob, compiled: Compiled) -> None:
        def finish(error: Exception | None) -> None:
            if not isinstance(error, GpuFailed):  # else the GPU may still be at that memory
                job.release()
            self._outcomes.tell_end(op, error)

        if job.is_quick(compiled.wholes):
            job.fold_locally(compiled.wholes, finish)
        else:
            self._workers.submit(partial(job.fold_locally, compiled.wholes, finish))

    def _contribute(self, job: GpuJob, exchange: Exchange, tasks: Sequence[Task]) -> None:
        """Let the GPU fold what local ranks bring; each task is done as soon as its part is."""

        def contributed(task: Task, error: Exception | None) -> None:
            # Whoever sees that the GPU is done must not be kept from seeing more by a fold here.
            self._workers.submit(partial(exchange.contributed, task, error))

        for task in tasks:
            if exchange.failed:
                exchange.contributed(task, None)
                continue
            pieces = exchange.pieces(task)
            job.contribute(pieces, exchange.buffer, partial(contributed, task))

    def _distribute(self, op: Op, job: Job, compiled: Compiled, exchange: Exchange) -> None:
        """Every task is done: copy to the local ranks what they do not have yet."""
        if not self._outcomes.settle(op):
            return

        def finish(error: Exception | None) -> None:
            if not isinstance(error, GpuFailed):
                exchange.release()
                if op.gpu_job is not None:
                    op.gpu_job.release()
            self._outcomes.tell_end(op, error)

        due = compiled.rest if exchange.early else compiled.results
        if not due:  # a GPU need not be asked, which may be busy with other ops
            finish(None)
            return
        if op.gpu_job is not None:
            hand_out = op.gpu_job.hand_out
            self._workers.submit(partial(hand_out, due, exchange.buffer, finish))
            return

        def copy(part: Part, start: int, stop: int) -> None:
            job.hand_out(part, start, stop, exchange.range(start, stop))

        over_pieces(
            due,
            job.arithmetic.kept_itemsize,
            compiled.copy_bytes,
            self._workers,
            copy,
            finish,
        )


def _contribution(exchange: Exchange, task: Task) -> Callable[[], None]:
    return lambda: exchange.contribute(task)
