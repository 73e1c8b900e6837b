"""The receives of one op on this node, in the order of each edge."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import Task, TaskGraph, TaskKind
from allfold_agent.execution.op_state import OpState
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.wire.frames import FrameHeader, FrameType


@dataclass(slots=True)
class SliceLanding:
    """Memory for the payload of a frame; released by :meth:`ReceivingOp.received`."""

    task: Task
    view: memoryview
    buffer: Buffer | None = None

    def release(self) -> None:
        """Let go of the memory."""
        if self.buffer is not None:
            self.buffer.release()


class ReceivingOp(OpState):
    """The sink of an op's frames."""

    def __init__(self, graph: TaskGraph, operands: Operands, buffers: BufferPool) -> None:
        super().__init__(graph, operands, buffers)
        self._next_receive = dict.fromkeys(graph.receives, 0)
        self._scratch: dict[int, Buffer] = {}

    @abstractmethod
    def complete(self, task: Task) -> None:
        """Count a task as done and do what became ready by it."""

    def is_ready(self, source: int) -> bool:
        """Return True if the next frame of a node may be admitted."""
        order = self.graph.receives.get(source, ())
        position = self._next_receive.get(source, 0)
        return self.failed or position == len(order) or not self._waits_for[order[position]]

    def await_ready(self, source: int, seconds: float) -> bool:
        """Wait until :meth:`is_ready`; false where it is not within so many seconds."""
        with self._lock:
            return self._changed.wait_for(partial(self.is_ready, source), timeout=seconds)

    def admit(self, source: int, header: FrameHeader) -> SliceLanding | None:
        """Return the landing of a frame; ``None`` if the op failed. Not before :meth:`is_ready`.

        Raises:
            PeerSentIncoherentTensor: this is not the frame that the edge has to bring next.
        """
        task = self._expect(source)
        if task is None or not self._fits(task, header):
            expected = "no more frames" if task is None else self._describe(task)
            raise PeerSentIncoherentTensor(
                f"op {header.seq} got {header.length} bytes at element {header.offset}, "
                f"expected {expected}"
            )
        try:
            return self._land(task)
        except BaseException:
            self._next_receive[source] -= 1  # the frame comes again, on a new connection
            raise

    def _expect(self, source: int) -> Task | None:
        """The next task that an edge feeds, in edge order; ``None`` when it expects no more."""
        order = self.graph.receives.get(source, ())
        position = self._next_receive.get(source, 0)
        if position == len(order):
            return None
        self._next_receive[source] = position + 1
        return self.graph.tasks[order[position]]

    def _fits(self, task: Task, header: FrameHeader) -> bool:
        kind = FrameType.SIGNAL if task.kind is TaskKind.AWAIT else FrameType.DATA
        expected = (kind, task.start, self.nbytes(task))
        return (header.type, header.offset, header.length) == expected

    def _describe(self, task: Task) -> str:
        return f"{self.nbytes(task)} bytes at element {task.start}"

    def all_received(self, source: int) -> bool:
        """Return True if the last frame of an edge has come."""
        return self._next_receive.get(source, 0) == len(self.graph.receives.get(source, ()))

    def awaited_sources(self) -> list[int]:
        """The nodes from which frames are still to come."""
        return [source for source in self.graph.receives if not self.all_received(source)]

    def retract(self, source: int, landing: SliceLanding) -> None:
        """The payload of an admitted frame broke off; it will come again."""
        self._next_receive[source] -= 1
        landing.release()

    def _land(self, task: Task) -> SliceLanding | None:
        with self._lock:
            if self.failed:
                return None
            if task.kind is TaskKind.AWAIT:
                return SliceLanding(task, memoryview(b""))
            if task.kind is TaskKind.RECEIVE_OPERAND or self._operands.codec is not None:
                buffer = self._buffers.take(self.nbytes(task))
                return SliceLanding(task, buffer.view[: self.nbytes(task)], buffer)
            return SliceLanding(task, self._native(task), self.buffer.hold())

    def received(self, landing: SliceLanding) -> None:
        """The payload has landed: go on."""
        task = landing.task
        if task.kind is TaskKind.RECEIVE_OPERAND:
            assert landing.buffer is not None
            with self._lock:
                self._scratch[task.index] = landing.buffer
            self.complete(task)
            return
        try:
            if (
                self._operands.codec is None
                or landing.buffer is None
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
