"""Writes the results of ops to the memory of the local ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.compiler import Compiled
from allfold_agent.execution.op import Done, Op, OpOutcomes, over_pieces
from allfold_agent.gpu.operands import GpuOperands
from allfold_agent.runtime.buffers import Buffer
from allfold_agent.runtime.threads import WorkerPool
from allfold_core.errors import GpuFailed
from allfold_core.schedules.parts import Part, Piece

Range = Callable[[int, int], Array]


class ResultWriter:
    """Hands out results: folded here, received from other nodes, or fetched from one of them.

    Such an op can no longer fail, so no rank is told that its memory is free before the result is
    written.
    """

    def __init__(self, workers: WorkerPool, outcomes: OpOutcomes) -> None:
        self._workers = workers
        self._outcomes = outcomes

    def write(self, op: Op) -> None:
        """Write the result of an op to every local rank that gets it, then report its end."""
        compiled, operands, executor = op.compiled, op.operands, op.executor
        assert compiled is not None and operands is not None
        done = partial(self._finish, op)
        if op.result is not None:
            values = _values(op.result, compiled)
            _learn_weights(operands, values)
            self._write(op, compiled.results, op.result, values, done)
        elif executor is not None:
            due = compiled.rest if executor.early else compiled.results
            _learn_weights(operands, executor.range)
            self._write(op, due, executor.buffer, executor.range, done)
        elif op.gpu_operands is not None:
            self._fold_on_gpu(op.gpu_operands, compiled, done)
        else:
            self._fold(operands, compiled, done)

    def _finish(self, op: Op, error: Exception | None) -> None:
        if not isinstance(error, GpuFailed):  # else the GPU may still be at that memory
            if op.executor is not None:
                op.executor.release()
            if op.gpu_operands is not None:
                op.gpu_operands.release()
            if op.result is not None:
                op.result.release()
                op.result = None
        self._outcomes.end(op, error)

    def _fold(self, operands: Operands, compiled: Compiled, done: Done) -> None:
        over_pieces(
            compiled.wholes,
            operands.arithmetic.itemsize,
            compiled.fold_bytes,
            self._workers,
            operands.fold_locally,
            done,
        )

    def _fold_on_gpu(self, operands: GpuOperands, compiled: Compiled, done: Done) -> None:
        if operands.is_quick(compiled.wholes):
            operands.fold_locally(compiled.wholes, done)
        else:
            self._workers.submit(partial(operands.fold_locally, compiled.wholes, done))

    def _write(
        self, op: Op, due: tuple[Piece, ...], buffer: Buffer, values: Range, done: Done
    ) -> None:
        operands, compiled = op.operands, op.compiled
        assert operands is not None and compiled is not None
        if not due:  # a GPU need not be asked, which may be busy with other ops
            done(None)
            return
        if op.gpu_operands is not None:
            self._workers.submit(partial(op.gpu_operands.hand_out, due, buffer, done))
            return

        def copy(part: Part, start: int, stop: int) -> None:
            operands.hand_out(part, start, stop, values(start, stop))

        over_pieces(
            due,
            operands.arithmetic.kept_itemsize,
            compiled.copy_bytes,
            self._workers,
            copy,
            done,
        )


def _learn_weights(operands: Operands, values: Range) -> None:
    """Take the weights of all ranks from a result; before any of it is divided by their sum."""
    where = operands.layout.weights
    if operands.weights is not None and where is not None:
        operands.weights.learn(values(where.start, where.stop))


def _values(buffer: Buffer, compiled: Compiled) -> Range:
    """The elements of a result that has come whole from another node."""
    layout = compiled.layout
    work = compiled.arithmetic.kept(buffer.view, layout.held)

    def values(start: int, stop: int) -> Array:
        place = layout.place(start)
        return work[place : place + stop - start]

    return values
