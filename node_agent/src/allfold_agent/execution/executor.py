"""One op's run through its task graph on this node.

No thread of its own: whoever completes a task (a worker, the edges' reactor) carries on with what
became ready. A fold runs in the thread that received its last operand, while that is in cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import INPUTS, SENDING, Task, TaskGraph, TaskKind
from allfold_agent.execution.carried_weights import CarriedWeights
from allfold_agent.execution.transfers import Received, ReceivingOp, SendingOp
from allfold_agent.runtime.buffers import BufferPool
from allfold_core.errors import GpuFailed
from allfold_core.schedules.parts import Piece

log = logging.getLogger(__name__)

HandOut = Callable[[Sequence[Piece], Callable[[Exception | None], None]], None]

_RECEIVING = (TaskKind.RECEIVE, TaskKind.RECEIVE_OPERAND, TaskKind.AWAIT)
_COMPUTING = (TaskKind.FOLD, TaskKind.ENCODE)


def _nothing() -> None:
    """Do nothing at the end of an op that is over."""


def _ignore(error: Exception) -> None:
    """Do nothing about a failure of an op that is over."""


class Executor(SendingOp, ReceivingOp):
    """Runs the tasks of one op as they become ready; edges take and deliver its frames.

    Args:
        graph: the task graph of this node.
        operands: the op's inputs, and how it computes.
        buffers: where work and scratch memory come from.
        on_sendable: called with a destination when a send to it may have become ready.
        on_receivable: called with a source when what it sends next can be received.
        on_finished: called once, when every task is done.
        on_failed: called when this node cannot compute what it has to.
        early: whether results are handed out chunk by chunk. Only for ops whose results do not
            overwrite inputs, because inputs stay untouched until it is certain that the op
            succeeds.
        hand_out: has a GPU do so, where ranks have their memory there: given what of the result is
            there, and who is told when the ranks have it.
        floor: all ops up to this one are final on this node.
    """

    def __init__(
        self,
        graph: TaskGraph,
        operands: Operands,
        buffers: BufferPool,
        on_sendable: Callable[[int], None],
        on_receivable: Callable[[int], None],
        on_finished: Callable[[], None],
        on_failed: Callable[[Exception], None],
        early: bool = False,
        hand_out: HandOut | None = None,
        floor: int = -1,
    ) -> None:
        super().__init__(graph, operands, buffers, floor)
        self.early = early
        self._arithmetic = operands.arithmetic
        weights = operands.weights if operands.weighs else None
        self._carried = None if weights is None else CarriedWeights(weights.of_node)
        self._on_sendable = on_sendable
        self._on_receivable = on_receivable
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._on_gpu = hand_out
        self._remaining = len(graph.tasks)
        if early:
            self._remaining += sum(task.final for task in graph.tasks)
        self._handing_out = 0
        self._after_handing_out: list[Callable[[], None]] = []

    # Running

    def start(self) -> Sequence[Task]:
        """Begin: returns the contributions, which the caller has someone :meth:`contribute`."""
        graph = self.graph
        if not graph.tasks:
            self._on_finished()
            return ()
        for destination in graph.first_destinations:
            self._on_sendable(destination)
        with self._lock:
            if self.failed:  # its memory may have been given up already
                return ()
            for _ in graph.contributions:
                self.buffer.hold()
        return graph.contributions

    def contribute(self, task: Task) -> None:
        """Fold the local inputs into the task's range of the work buffer."""
        operands, problem = self._operands, None
        try:
            if not self.failed:
                self._fold_inputs(task, operands)
        except Exception as error:  # noqa: BLE001 - it is handed on
            problem = error
        self.contributed(task, problem)

    def contributed(self, task: Task, error: Exception | None) -> None:
        """Complete a task whose local inputs are folded into its range, or fail the op.

        After an error of a GPU nobody may use the work buffer, because the GPU may still write to
        it.
        """
        try:
            if error is not None:
                log.error("the inputs of an op cannot be folded", exc_info=error)
                self._on_failed(error)
            elif not self.failed:
                self.complete(task)
        finally:
            if not isinstance(error, GpuFailed):
                self.buffer.release()

    def _fold_inputs(self, task: Task, operands: Operands) -> None:
        for part, start, stop in operands.layout.parts_in(task.start, task.stop):
            if part.sources:
                operands.fold_inputs(part, start, stop, self.range(start, stop))

    def pieces(self, task: Task) -> list[Piece]:
        """The parts in a task's range."""
        return list(self._operands.layout.parts_in(task.start, task.stop))

    def complete(self, task: Task) -> None:
        """Count a task as done and do what became ready by it."""
        todo = [task]
        destinations: set[int] = set()
        sources: set[int] = set()
        results: list[Task] = []
        finished = False
        while todo:
            own: list[Task] = []
            with self._lock:
                if self.failed:
                    return
                for done in todo:
                    self._count(done, own, destinations, sources)
                if self.early:
                    results += [done for done in todo if done.final]
                finished = self._remaining == 0
                # A verdict may end the op at any moment, and with it the op's own holds.
                operands = self._operands
                if own:
                    self.buffer.hold()
            if own and not self._compute_all(own, operands):
                return
            todo = own
        for destination in destinations:
            self._on_sendable(destination)
        for source in sources:
            self._on_receivable(source)
        if results:
            self._hand_out(results, operands)
        elif finished:
            self._on_finished()

    def _hand_out(self, tasks: Sequence[Task], operands: Operands) -> None:
        """Give the local ranks what is ready of their results."""
        with self._lock:
            if self.failed:
                return
            # In one step with the look at failed: fail() waits for those that are counted here.
            self._handing_out += 1
            self.buffer.hold()
            on_gpu = self._on_gpu
        layout = operands.layout
        pieces = [each for task in tasks for each in layout.parts_in(task.start, task.stop)]
        due = [(part, start, stop) for part, start, stop in pieces if part.targets]
        if on_gpu is not None:
            on_gpu(due, partial(self._handed_out, len(tasks)))
            return
        error: Exception | None = None
        try:
            for part, start, stop in due:
                operands.hand_out(part, start, stop, self.range(start, stop))
        except Exception as problem:  # noqa: BLE001 - it is handed on
            error = problem
        self._handed_out(len(tasks), error)

    def _handed_out(self, count: int, error: Exception | None) -> None:
        """Count tasks whose results the local ranks have, or fail the op."""
        if error is not None:
            log.error("the result of an op cannot be handed out", exc_info=error)
        if not isinstance(error, GpuFailed):  # else a GPU may still read it
            self.buffer.release()
        with self._lock:
            self._handing_out -= 1
            if error is None:  # else the op must not count as done before its failure is known
                self._remaining -= count
            finished = self._remaining == 0 and not self.failed
            after: list[Callable[[], None]] = []
            if not self._handing_out:
                after, self._after_handing_out = self._after_handing_out, after
        for then in after:
            then()
        if error is not None:
            self._on_failed(error)
        elif finished:
            self._on_finished()

    def _compute_all(self, tasks: Sequence[Task], operands: Operands) -> bool:
        """Fold and encode, with the work buffer held for it; false where that failed."""
        try:
            for task in tasks:
                if task.kind is TaskKind.FOLD:
                    self._fold(task, operands)
                else:
                    self._encode(task)
        except Exception as error:
            log.exception("what other nodes sent cannot be folded")
            self._on_failed(error)
            return False
        finally:
            self.buffer.release()
        return True

    def _count(
        self, done: Task, own: list[Task], destinations: set[int], sources: set[int]
    ) -> None:
        self._remaining -= 1
        tasks = self.graph.tasks
        for index in done.successors:
            self._waits_for[index] -= 1
            if self._waits_for[index]:
                continue
            task = tasks[index]
            if task.kind in _COMPUTING:
                own.append(task)
            elif task.kind in SENDING:
                destinations.add(task.peer)
            elif task.kind in _RECEIVING:
                sources.add(task.peer)
            elif task.kind is TaskKind.FENCE:
                self._count(task, own, destinations, sources)

    def _fold(self, task: Task, operands: Operands) -> None:
        part = self.range(task.start, task.stop)
        with self._lock:
            if self.failed:  # release() lets go of what was received
                return
            scratch = [self._scratch.pop(index) for index in task.operands if index >= 0]
        try:
            received = iter(scratch)
            values = [
                self._decoded(next(received), task) if index >= 0 else part
                for index in task.operands
            ]
            if INPUTS in task.operands:
                values[task.operands.index(INPUTS)] = self._own(task, operands, part)
            self._arithmetic.fold(part, values)
            if self._carried is not None and operands.codec(task.start) is not None:
                nbytes = self.nbytes(task)
                self._carried.fold(task, [each.view[:nbytes] for each in scratch])
        finally:
            for buffer in scratch:
                buffer.release()

    def _own(self, task: Task, operands: Operands, part: Array) -> Array:
        """Return the local contribution to a range: a rank's memory, where it is the only one."""
        alone = operands.only_input(task.start, task.stop)
        if alone is not None:
            return alone
        self._fold_inputs(task, operands)
        return part

    def _decoded(self, received: Received, task: Task) -> Array:
        codec, numel = self._operands.codec(task.start), task.stop - task.start
        if codec is None:
            return self._arithmetic.kept(received.view, numel)
        values = np.empty(numel, self._arithmetic.kept_dtype)
        codec.decode(received.view[: self._operands.code_bytes(numel)], values)
        return values

    def _encode(self, task: Task) -> None:
        codec = self._operands.codec(task.start)
        assert codec is not None
        values = self.range(task.start, task.stop)
        buffer = self._buffers.take(self.nbytes(task))
        code = buffer.view[: self._operands.code_bytes(len(values))]
        residual = self._operands.residual
        weight = 1.0
        if self._carried is not None:
            weight = self._carried.encode(task, buffer.view[: self.nbytes(task)])
        if residual is None:
            codec.encode(values, code)
        else:
            residual.encode(self._operands.layout.place(task.start), values, code, codec, weight)
        self._keep_code(task, buffer)

    def fail(self, then: Callable[[], None]) -> None:
        """Stop: nothing is sent, received, folded or handed out any more.

        Args:
            then: called, maybe by another thread, when nobody writes to the memory of ranks any
                more. Ranks that are told of the failure may use theirs again.
        """
        with self._lock:
            self.failed = True
            if self._handing_out:
                self._after_handing_out.append(then)
                return
        then()

    def release(self) -> None:
        """Give up the op's hold on its memory; frames in flight keep theirs."""
        self.buffer.release()
        with self._lock:
            kept = [*self._codes.values(), *self._scratch.values()]
            self._codes, self._scratch = {}, {}
        for buffer in kept:
            buffer.release()
        # Frames may keep this object for a while; it must not keep the memory of ranks.
        self._operands = self._operands.without_inputs()
        self._on_gpu = None
        self._on_finished = _nothing
        self._on_failed = _ignore
