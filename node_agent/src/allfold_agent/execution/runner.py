"""Runs the ops of one epoch that every local rank has called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from allfold_agent.arithmetic.error_feedback import Residual, Residuals
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.compiler import Compiled, Compiler
from allfold_agent.compilation.op_spec import OpSpec
from allfold_agent.compilation.task_graph import Task
from allfold_agent.edges.edges import Edges
from allfold_agent.execution.executor import Executor, HandOut
from allfold_agent.execution.op import INLINE_FOLD_BYTES, Op, over_pieces
from allfold_agent.execution.op_receiver import OpReceiver
from allfold_agent.execution.op_sender import OpSender
from allfold_agent.gpu.operands import GpuOperands
from allfold_agent.gpu.pins import Pins
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_agent.runtime.workers import WorkerPool
from allfold_core.errors import GpuFailed
from allfold_core.plan import Plan
from allfold_core.schedules.parts import Part, Piece

# Less is handed out when all of it is there: at once.
EARLY_BYTES = 256 * 1024


class OpOutcomes(Protocol):
    """Decides on the outcome of ops: the group."""

    def settle(self, op: Op) -> bool:
        """Decide that the op succeeds; return False if it has failed before."""

    def end(self, op: Op, error: Exception | None) -> None:
        """Every local rank has its result, or this node failed to give it to them."""

    def cannot_run(self, seq: int, error: Exception) -> None:
        """This node cannot do its part of an op."""


class Runner:
    """Prepares and starts ops, and hands out their results.

    Args:
        plan: of the epoch.
        me: this node's index.
        stamp: of the epoch.
        edges: of the group, to and from the other nodes.
        outcomes: told when an op may end, and when it has.
        pins: memory of the host that GPUs reach.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        stamp: int,
        workers: WorkerPool,
        buffers: BufferPool,
        edges: Edges,
        outcomes: OpOutcomes,
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
        self._stamp = stamp
        self._nodes = tuple(member.node for member in plan.members)
        self._placement = tuple(member.ranks for member in plan.members)
        self._residuals = Residuals()
        self._compiler = Compiler(plan, me)

    def prepare(self, op: Op) -> None:
        """Set an op up while the order of ops is locked; :meth:`start` sets it going."""
        spec = op.spec
        op.strategy = spec.strategy
        callers = self.ranks if spec.is_exchange else self.ranks[:1]
        calls = tuple(op.arrivals[rank].spec for rank in callers)
        op.compiled = compiled = self._compiler.compile(calls, op.on_gpu)
        # Where a rank has its memory on a GPU, the CPU folds for none.
        elements: Callable[[Any], torch.Tensor] = compiled.arithmetic.elements
        arrivals = {} if op.on_gpu else op.arrivals
        op.operands = Operands(
            compiled.layout,
            compiled.arithmetic,
            {rank: elements(arrival.source) for rank, arrival in arrivals.items()},
            {rank: elements(arrival.target) for rank, arrival in arrivals.items()},
            spec.wire,
            self._residual(spec, compiled),
        )
        if op.on_gpu:
            op.gpu_operands = self._prepare_gpu_operands(op, compiled)
        if len(self.plan.members) > 1:
            op.executor = self._prepare_executor(op, op.operands, compiled)
        op.running = True

    def _prepare_gpu_operands(self, op: Op, compiled: Compiled) -> GpuOperands:
        arrivals = op.arrivals.items()
        return GpuOperands(
            compiled.layout,
            compiled.arithmetic,
            {rank: arrival.source_place() for rank, arrival in arrivals},
            {rank: arrival.target_place() for rank, arrival in arrivals},
            buffers=self._buffers,
            pins=self._pins,
            until=op.first_call + op.timeout,
        )

    def _residual(self, spec: OpSpec, compiled: Compiled) -> Residual | None:
        series = spec.fingerprint.feedback
        if not series:
            return None
        held, dtype = compiled.layout.held, compiled.arithmetic.kept_dtype
        return self._residuals.of(series, held, dtype)

    def _prepare_executor(self, op: Op, operands: Operands, compiled: Compiled) -> Executor:
        graph = compiled.graph
        # All of them before anything is queued: what is queued of an op that was not prepared to
        # the end would block its edge.
        nodes, edges = self._nodes, self._edges
        outs = {destination: edges.out(nodes[destination]) for destination in graph.sends}
        ins = {source: edges.open_in(nodes[source]) for source in graph.receives}
        executor = Executor(
            graph,
            operands,
            self._buffers,
            on_sendable=lambda destination: outs[destination].kick(),
            on_receivable=lambda source: ins[source].resume(),
            on_finished=lambda: self._distribute(op, operands, compiled, executor),
            on_failed=lambda error: self._outcomes.cannot_run(op.seq, error),
            early=compiled.copy_bytes > EARLY_BYTES
            and (op.gpu_operands or operands).outputs_are_no_inputs(),
            hand_out=self._on_gpu(op.gpu_operands, lambda: executor.buffer)
            if op.gpu_operands
            else None,
        )
        for source in ins:
            op.receivers[nodes[source]] = self._receiver(op, executor, source)
        for destination, edge in outs.items():
            digest = op.digest(self.ranks, self._placement[destination])
            edge.enqueue(OpSender(executor, destination, op.seq, self._stamp, digest))
        return executor

    def _receiver(self, op: Op, executor: Executor, source: int) -> OpReceiver:
        return OpReceiver(executor, source, op.digest(self._placement[source], self.ranks))

    def receiver(self, op: Op, source: str) -> OpReceiver | None:
        """Return what a running op gets from a node; ``None`` for one that is not in the epoch.

        An op has one for each node that its schedule names. One that it does not name should send
        nothing; it may have another op under this number, which the fingerprint tells.
        """
        found = op.receivers.get(source)
        if found is None and op.executor is not None and source in self._nodes:
            found = self._receiver(op, op.executor, self._nodes.index(source))
        return found

    def _on_gpu(self, operands: GpuOperands, buffer: Callable[[], Buffer]) -> HandOut:
        """Return the function that hands results to ranks on GPUs, in a thread of the workers."""

        def hand_out(pieces: Sequence[Piece], done: Callable[[Exception | None], None]) -> None:
            self._workers.submit(lambda: operands.hand_out(pieces, buffer(), done))

        return hand_out

    # Running

    def start(self, op: Op) -> None:
        """Set a prepared op going."""
        assert op.operands is not None and op.compiled is not None
        if op.executor is None:
            if op.gpu_operands is None:
                self._fold_locally(op, op.operands, op.compiled)
            elif self._outcomes.settle(op):
                self._fold_on_gpu(op, op.gpu_operands, op.compiled)
            return
        executor = op.executor
        contributions = executor.start()
        if op.gpu_operands is not None:
            self._workers.submit(
                partial(self._contribute, op.gpu_operands, executor, contributions)
            )
            return
        size = sum(task.stop - task.start for task in contributions)
        inline = size * op.operands.arithmetic.kept_itemsize * len(self.ranks) <= INLINE_FOLD_BYTES
        for task in contributions:
            if inline:
                executor.contribute(task)
            else:
                self._workers.submit(_contribution(executor, task))

    def cancel(self, op: Op, then: Callable[[], None]) -> None:
        """Stop an op that has failed; ``then()`` once no rank's memory is in use by it."""
        executor = op.executor
        if executor is None:
            then()
            return
        executor.fail(then)
        executor.release()
        for destination in executor.graph.sends:
            self._edges.wake(self._nodes[destination])

    def _fold_locally(self, op: Op, operands: Operands, compiled: Compiled) -> None:
        # With every rank here nothing can fail the op any more, and no verdict may tell the ranks
        # that their memory is theirs again while workers write to it.
        if not self._outcomes.settle(op):
            return
        over_pieces(
            compiled.wholes,
            operands.arithmetic.itemsize,
            compiled.fold_bytes,
            self._workers,
            operands.fold_locally,
            lambda error: self._outcomes.end(op, error),
        )

    def _fold_on_gpu(self, op: Op, operands: GpuOperands, compiled: Compiled) -> None:
        def finish(error: Exception | None) -> None:
            if not isinstance(error, GpuFailed):  # else the GPU may still be at that memory
                operands.release()
            self._outcomes.end(op, error)

        if operands.is_quick(compiled.wholes):
            operands.fold_locally(compiled.wholes, finish)
        else:
            self._workers.submit(partial(operands.fold_locally, compiled.wholes, finish))

    def _contribute(self, operands: GpuOperands, executor: Executor, tasks: Sequence[Task]) -> None:
        """Have the GPU fold the inputs of local ranks; each task is done as soon as its part is."""

        def contributed(task: Task, error: Exception | None) -> None:
            # The thread that polls the GPU must not fold: other completions would wait for it.
            self._workers.submit(partial(executor.contributed, task, error))

        for task in tasks:
            if executor.failed:
                executor.contributed(task, None)
                continue
            pieces = executor.pieces(task)
            operands.contribute(pieces, executor.buffer, partial(contributed, task))

    def _distribute(
        self, op: Op, operands: Operands, compiled: Compiled, executor: Executor
    ) -> None:
        """Every task is done: copy to the local ranks what they do not have yet."""
        if not self._outcomes.settle(op):
            return

        def finish(error: Exception | None) -> None:
            if not isinstance(error, GpuFailed):
                executor.release()
                if op.gpu_operands is not None:
                    op.gpu_operands.release()
            self._outcomes.end(op, error)

        due = compiled.rest if executor.early else compiled.results
        if not due:  # a GPU need not be asked, which may be busy with other ops
            finish(None)
            return
        if op.gpu_operands is not None:
            hand_out = op.gpu_operands.hand_out
            self._workers.submit(partial(hand_out, due, executor.buffer, finish))
            return

        def copy(part: Part, start: int, stop: int) -> None:
            operands.hand_out(part, start, stop, executor.range(start, stop))

        over_pieces(
            due,
            operands.arithmetic.kept_itemsize,
            compiled.copy_bytes,
            self._workers,
            copy,
            finish,
        )


def _contribution(executor: Executor, task: Task) -> Callable[[], None]:
    return lambda: executor.contribute(task)
