"""Runs the ops of one epoch that every local rank has called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.error_feedback import ResidualAttempt, Residuals
from allfold_agent.arithmetic.kernels import Arithmetic
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.arithmetic.weights import Weights
from allfold_agent.compilation.compiler import Compiled, Compiler
from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.compilation.task_graph import Task
from allfold_agent.edges.edges import Edges
from allfold_agent.execution.executor import Executor, HandOut
from allfold_agent.execution.op import INLINE_FOLD_BYTES, Arrival, Op, OpOutcomes
from allfold_agent.execution.op_edges import OpReceiver, OpSender
from allfold_agent.gpu.gpus import Pins
from allfold_agent.gpu.operands import GpuOperands, Nowhere
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import InvalidArgument
from allfold_core.plan import Plan
from allfold_core.schedules.parts import OWN, Piece
from allfold_core.survival.records import Stamp

# Less is handed out when all of it is there: at once.
EARLY_BYTES = 256 * 1024


class Runner:
    """Prepares, starts and cancels attempts of ops in one epoch.

    Args:
        plan: of the epoch.
        me: this node's index.
        stamp: of the epoch.
        edges: of the group, to and from the other nodes.
        outcomes: told when an op may end, and when it has.
        pins: memory of the host that GPUs reach.
        residuals: what lossy wires owe to series of ops, over all epochs.
        specs: of calls in this epoch.
    """

    def __init__(
        self,
        plan: Plan,
        me: int,
        stamp: Stamp,
        workers: WorkerPool,
        buffers: BufferPool,
        edges: Edges,
        outcomes: OpOutcomes,
        pins: Pins,
        residuals: Residuals,
        specs: OpSpecs,
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
        self._packed = stamp.pack()
        self._nodes = tuple(member.node for member in plan.members)
        self._placement = tuple(member.ranks for member in plan.members)
        self._residuals = residuals
        self._specs = specs
        self._compiler = Compiler(plan, me)

    def prepare(self, op: Op, watermark: Callable[[], int]) -> None:
        """Set an op up while the order of ops is locked; :meth:`start` sets it going.

        Args:
            watermark: all ops up to the one that it returns are final on this node.
        """
        compiled, operands = self._prepare_memory(op)
        if len(self.plan.members) > 1:
            op.executor = self._prepare_executor(op, operands, compiled, watermark())
        op.running = True

    def prepare_result(self, op: Op) -> int:
        """Set an op up whose result comes from another node; return the size of that in bytes.

        Dead ranks have not called it; their parts of the result are dropped.
        """
        for rank in self.ranks:
            if rank not in op.arrivals:
                op.arrivals[rank] = self._nobody(op, rank)
        compiled, _ = self._prepare_memory(op)
        op.running = True
        return compiled.layout.held * compiled.arithmetic.kept_itemsize

    def _prepare_memory(self, op: Op) -> tuple[Compiled, Operands]:
        spec = op.spec
        if spec.is_weighted and op.on_gpu:
            raise InvalidArgument("the tensors of a round lie in the memory of the host")
        op.strategy = spec.strategy
        calls: tuple[OpSpec, ...] = (spec,)
        if spec.is_exchange:
            calls = tuple([op.arrivals[rank].spec for rank in self.ranks])
        elif spec.is_weighted:  # not compiled anew for other weights
            calls = (self._specs.of(spec.common),)
        op.compiled = compiled = self._compiler.compile(calls, op.on_gpu)
        inputs: dict[int, Array] = {}
        outputs: dict[int, Array] = {}
        if op.on_gpu:  # where a rank has its memory on a GPU, the CPU folds for none
            op.gpu_operands = self._prepare_gpu_operands(op, compiled)
        else:
            elements: Callable[[Any], Array] = compiled.arithmetic.elements
            for rank, arrival in op.arrivals.items():
                source, target = arrival.source, arrival.target
                inputs[rank] = outputs[rank] = elements(source)
                if target is not source:
                    outputs[rank] = elements(target)
        weights = self._weights(op) if spec.is_weighted else None
        residual = self._residual(op, spec, compiled, 1.0 if weights is None else weights.of_node)
        if weights is not None and compiled.layout.weights:
            inputs[OWN] = weights.elements(compiled.arithmetic.kept_dtype)
        op.operands = operands = Operands(
            compiled.layout,
            compiled.arithmetic,
            inputs,
            outputs,
            spec.wire,
            residual,
            weights,
            weighs=weights is not None and residual is not None,
        )
        return compiled, operands

    def _weights(self, op: Op) -> Weights:
        own = {rank: arrival.spec.fingerprint.factor for rank, arrival in op.arrivals.items()}
        return Weights(own, self.plan.world_size)

    def _prepare_gpu_operands(self, op: Op, compiled: Compiled) -> GpuOperands:
        arrivals = op.arrivals.items()
        return GpuOperands(
            compiled.layout,
            compiled.arithmetic,
            {rank: arrival.source_place() for rank, arrival in arrivals},
            {rank: arrival.target_place() for rank, arrival in arrivals},
            buffers=self._buffers,
            pins=self._pins,
            until=op.deadline,
        )

    def _residual(
        self, op: Op, spec: OpSpec, compiled: Compiled, weight: float
    ) -> ResidualAttempt | None:
        series = spec.fingerprint.feedback
        if not series:
            return None
        layout, dtype = compiled.layout, compiled.arithmetic.kept_dtype
        blocks = layout.parts if spec.fingerprint.kind.has_blocks else ()
        # Without the weights, of which there are others when ranks have come or gone.
        numel = layout.weights.start if layout.weights else layout.held
        return self._residuals.of(series, numel, dtype, blocks).attempt(op.seq, weight)

    def keeping(self, late: Arrival) -> Callable[[], None] | None:
        """Return what keeps the input of a rank for the next round of its series.

        The round that it was for has not waited for it. With error feedback, it is owed to the next
        one then, as what rounding has cost; without, nothing is kept. It comes back by the weight
        that the node has then, of which each of its ranks has an equal share: which weights the
        others had in the round that is over is not known any more.
        """
        fingerprint, source = late.spec.fingerprint, late.source
        if not (fingerprint.feedback and fingerprint.factor and len(self.plan.members) > 1):
            return None
        assert isinstance(source, memoryview)
        arithmetic = Arithmetic(fingerprint, self.plan.world_size)
        dtype, elements = arithmetic.kept_dtype, arithmetic.elements(source)
        residual = self._residuals.of(fingerprint.feedback, len(elements), dtype)

        def keep() -> None:
            owed = np.empty(len(elements), dtype)
            arithmetic.fold_inputs(owed, [elements], [1 / len(self.ranks)])
            residual.add(owed)

        return keep

    def _nobody(self, op: Op, rank: int) -> Arrival:
        """Return a call in place of a dead rank's, with memory that no rank reads."""
        other = next(iter(op.arrivals.values()))
        memory: Callable[[int], memoryview | Nowhere] = Nowhere if op.on_gpu else _unused_bytes
        source = memory(other.spec.input_bytes[rank])
        target = memory(other.spec.output_bytes[rank])
        return replace(other, rank=rank, source=source, target=target)

    def _prepare_executor(
        self, op: Op, operands: Operands, compiled: Compiled, watermark: int
    ) -> Executor:
        graph, spec = compiled.graph, op.spec
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
            on_finished=lambda: self._completed(spec, op, executor),
            on_failed=lambda error: self._outcomes.cannot_run(op.seq, error, self._stamp),
            early=compiled.copy_bytes > EARLY_BYTES
            and operands.weights is None
            and (op.gpu_operands or operands).outputs_are_no_inputs(),
            hand_out=self._on_gpu(op.gpu_operands, lambda: executor.buffer)
            if op.gpu_operands
            else None,
            floor=watermark,
        )
        for source in ins:
            op.receivers[nodes[source]] = self._receiver(op, executor, source)
        for destination, edge in outs.items():
            digest = op.digest(self.ranks, self._placement[destination])
            edge.enqueue(OpSender(executor, destination, op.seq, self._packed, digest))
        return executor

    def _completed(self, spec: OpSpec, op: Op, executor: Executor) -> None:
        op.exchanged_at = monotonic()
        floor = executor.floor if spec.hears_from_all else -1
        self._outcomes.completed(op.seq, self._stamp, floor)

    def _receiver(self, op: Op, executor: Executor, source: int) -> OpReceiver:
        return OpReceiver(executor, source, op.digest(self._placement[source], self.ranks))

    def receiver(self, op: Op, source: str) -> OpReceiver | None:
        """Return what a running op gets from a node; ``None`` for one that is not in the epoch.

        An op has one for each node that its schedule names. A node that the schedule does not name
        should send nothing. If it does, it may have another op under this number, which the
        fingerprint shows.
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

    def start(self, op: Op) -> Callable[[], None]:
        """Return what sets a prepared attempt going, whatever becomes of its op meanwhile."""
        executor, operands, on_gpu = op.executor, op.operands, op.gpu_operands
        assert executor is not None
        assert operands is not None
        if on_gpu is not None:
            return partial(self._start_on_gpu, executor, on_gpu)
        return partial(self._start, executor, operands)

    def _start_on_gpu(self, executor: Executor, operands: GpuOperands) -> None:
        contributions = executor.start()
        self._workers.submit(partial(self._contribute, operands, executor, contributions))

    def _start(self, executor: Executor, operands: Operands) -> None:
        contributions = executor.start()
        size = sum(task.stop - task.start for task in contributions)
        inline = size * operands.arithmetic.kept_itemsize * len(self.ranks) <= INLINE_FOLD_BYTES
        for task in contributions:
            if inline:
                executor.contribute(task)
            else:
                self._workers.submit(_contribution(executor, task))

    def cancel(self, op: Op, then: Callable[[], None], *, forward: bool) -> None:
        """Stop an attempt; ``then()`` once no rank's memory is written to by it.

        Args:
            forward: it has a result on other nodes, so what it encoded here counts.
        """
        executor, residual = op.executor, op.operands.residual if op.operands else None
        on_gpu = op.gpu_operands
        op.forget_attempt()
        if residual is not None and not forward:
            residual.give_up()
        if executor is not None:
            # In this order: an attempt that has failed takes hold of its memory no more.
            executor.fail(then)
            executor.release()
        if on_gpu is not None:  # after fail(): what is not given to the GPU any more counts as done
            on_gpu.release()
        if executor is None:
            then()
            return
        # After fail(): the edges find that nothing is left to be sent.
        for destination in executor.graph.sends:
            self._edges.wake(self._nodes[destination])

    def _contribute(self, operands: GpuOperands, executor: Executor, tasks: Sequence[Task]) -> None:
        """Fold the inputs of local ranks on the GPU; each task is done as soon as its part is."""

        def contributed(task: Task, error: Exception | None) -> None:
            # The thread that polls the GPU must not fold: other completions would wait for it.
            self._workers.submit(partial(executor.contributed, task, error))

        for task in tasks:
            if executor.failed:
                executor.contributed(task, None)
                continue
            pieces = executor.pieces(task)
            operands.contribute(pieces, executor.buffer, partial(contributed, task))


def _unused_bytes(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def _contribution(executor: Executor, task: Task) -> Callable[[], None]:
    return lambda: executor.contribute(task)
