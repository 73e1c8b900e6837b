"""The receives of one op on this node: what lands where, and what follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

import torch

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import Task, TaskGraph, TaskKind
from allfold_agent.execution.op_state import OpState
from allfold_agent.runtime.buffers import Buffer, BufferPool


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A payload that lies in memory of its sender, which keeps it until it is acknowledged."""

    bytes: torch.Tensor

    def release(self) -> None:
        """Do nothing: it is not ours."""


Received = Buffer | Borrowed


@dataclass(slots=True)
class SliceLanding:
    """Memory for the payload of a frame; released by :meth:`ReceivingOp.received`."""

    task: Task
    view: memoryview
    buffer: Received | None = None

    def release(self) -> None:
        """Let go of the memory."""
        if self.buffer is not None:
            self.buffer.release()


class ReceivingOp(OpState):
    """The memory that an op's frames land in. An :class:`OpReceiver` per node has their order."""

    def __init__(
        self, graph: TaskGraph, operands: Operands, buffers: BufferPool, floor: int
    ) -> None:
        super().__init__(graph, operands, buffers, floor)
        self._scratch: dict[int, Received] = {}

    @abstractmethod
    def complete(self, task: Task) -> None:
        """Count a task as done and do what became ready by it."""

    def waits(self, index: int) -> bool:
        """Return True while a task waits for another one."""
        return self._waits_for[index] > 0

    def await_progress(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds; false where it does not within so many seconds."""
        with self._lock:
            if self._changed is None:
                self._changed = Condition(self._lock)
            return self._changed.wait_for(condition, timeout=seconds)

    def land(self, task: Task, shared: torch.Tensor | None = None) -> SliceLanding | None:
        """Return the landing of the frame that a task receives; ``None`` if the op has failed.

        Args:
            shared: the payload in memory of its sender. It is folded from there where the fold
                waits for nothing else, so that it is done before the frame is acknowledged.
        """
        with self._lock:
            if self.failed:
                return None
            if task.kind is TaskKind.AWAIT:
                return SliceLanding(task, memoryview(b""))
            if shared is not None and self._is_last_operand(task):
                return SliceLanding(task, memoryview(b""), Borrowed(shared))
            if task.kind is TaskKind.RECEIVE_OPERAND or self._operands.codec is not None:
                nbytes = self.nbytes(task)
                buffer = self._buffers.take(nbytes)
                return SliceLanding(task, buffer.view[:nbytes], buffer)
            return SliceLanding(task, self._native(task), self.buffer.hold())

    def _is_last_operand(self, task: Task) -> bool:
        """Return True if a fold will be done as soon as the payload of this task is there."""
        if task.kind is not TaskKind.RECEIVE_OPERAND or self._operands.codec is not None:
            return False
        return all(self._waits_for[fold] == 1 for fold in task.successors)

    def received(self, landing: SliceLanding) -> None:
        """Take in a payload that has been received completely."""
        task = landing.task
        if task.kind is TaskKind.RECEIVE_OPERAND:
            assert landing.buffer is not None
            with self._lock:
                is_wanted = not self.failed
                if is_wanted:
                    self._scratch[task.index] = landing.buffer
            if is_wanted:
                self.complete(task)
            else:
                landing.release()
            return
        try:
            if (
                self._operands.codec is None
                or not isinstance(landing.buffer, Buffer)
                or self._decode(task, landing.buffer)
            ):
                self.complete(task)
        finally:
            landing.release()

    def _decode(self, task: Task, received: Buffer) -> bool:
        """Decode what came into the work buffer; false where the op has failed."""
        codec = self._operands.codec
        assert codec is not None
        with self._lock:
            if self.failed:  # the work buffer may be another op's by now
                return False
            self.buffer.hold()
        try:
            codec.decode(received.bytes[: self.nbytes(task)], self.range(task.start, task.stop))
        finally:
            self.buffer.release()
        self._keep_code(task, received.hold())
        return True
