"""The transfers of one op on this node: its sends in the order of each edge, and its receives."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from allfold_agent.arithmetic.arrays import Array
from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import Task, TaskGraph, TaskKind
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_agent.runtime.locks import make_rlock


class OpTasks:
    """The tasks of an op that are not done yet, and its work memory.

    Args:
        graph: the task graph of this node.
        operands: the op's inputs, and how it computes.
        buffers: where work and scratch memory come from.
        floor: all ops up to this one are final on this node.

    Attributes:
        floor: all ops up to this one are final on this node, and on every node whose data is in
            what this node has received. Once an op to which every node contributes is done, that
            means on all nodes.
    """

    def __init__(
        self, graph: TaskGraph, operands: Operands, buffers: BufferPool, floor: int
    ) -> None:
        self.graph = graph
        self.floor = floor
        self.failed = False
        self._operands = operands
        self._buffers = buffers
        self._size = operands.arithmetic.kept_itemsize
        self.buffer = buffers.take(operands.layout.held * self._size, shared=bool(graph.sends))
        self.work = operands.arithmetic.kept(self.buffer.view, operands.layout.held)
        self._lock = make_rlock("executor")
        self._waits_for = list(graph.waits_for)
        self._codes: dict[int, Buffer] = {}

    def range(self, start: int, stop: int) -> Array:
        """A range of the index space in the work buffer."""
        place = self._operands.layout.place(start)
        return self.work[place : place + stop - start]

    def nbytes(self, task: Task) -> int:
        """The payload size of a frame for this task."""
        return self._operands.wire_bytes(task.start, task.stop - task.start)

    def _native(self, task: Task) -> memoryview:
        start = self._operands.layout.place(task.start)
        return self.buffer.view[start * self._size : (start + task.stop - task.start) * self._size]

    def _keep_code(self, task: Task, buffer: Buffer) -> None:
        """Keep a code for those that send it, until the op is over."""
        with self._lock:
            if not self.failed:
                self._codes[task.index] = buffer
                return
        buffer.release()

    def lower_floor(self, floor: int) -> None:
        """Lower the floor to that of a frame's sender: the last op that it knows to be final."""
        if floor < self.floor:
            with self._lock:
                self.floor = min(floor, self.floor)


# To copy fewer takes no longer than to say where they are.
SHARED_PAYLOAD_BYTES = 16 * 1024


class SendingOp(OpTasks):
    """The payloads of an op for edges to other nodes."""

    def __init__(
        self, graph: TaskGraph, operands: Operands, buffers: BufferPool, floor: int
    ) -> None:
        super().__init__(graph, operands, buffers, floor)
        self._next_send = dict.fromkeys(graph.sends, 0)

    def take_send(self, destination: int) -> tuple[Task, Buffer] | None:
        """The next send on an edge, in edge order, if it is ready, and its memory, held for it."""
        order = self.graph.sends[destination]
        with self._lock:
            position = self._next_send[destination]
            if self.failed or position == len(order) or self._waits_for[order[position]]:
                return None
            self._next_send[destination] = position + 1
            task = self.graph.tasks[order[position]]
            memory = self.buffer if task.code < 0 else self._codes[task.code]
            return task, memory.hold()

    def next_send(self, destination: int) -> Task | None:
        """The send that comes next on an edge, ready or not."""
        order = self.graph.sends[destination]
        position = self._next_send[destination]
        return self.graph.tasks[order[position]] if position < len(order) else None

    def send_is_ready(self, destination: int) -> bool:
        """Return True if the next send on an edge is ready."""
        task = self.next_send(destination)
        return task is not None and not self.failed and not self._waits_for[task.index]

    def all_sent(self, destination: int) -> bool:
        """Return True if nothing is left to take for an edge."""
        return self.failed or self._next_send[destination] == len(self.graph.sends[destination])

    @property
    def sent_bytes(self) -> int:
        """The payloads of all that the op has to send, in bytes."""
        tasks = self.graph.tasks
        sends = (tasks[index] for order in self.graph.sends.values() for index in order)
        return sum(self.nbytes(task) for task in sends)

    def payload(self, task: Task, memory: Buffer) -> memoryview | bytes:
        """The bytes that a send puts on the wire."""
        view = memory.view[: self.nbytes(task)] if task.code >= 0 else self._native(task)
        return bytes(view) if task.snapshot else view

    def is_shared(self, task: Task) -> bool:
        """Return True if a receiver on this machine may read a payload where it lies.

        It stays as it is: the buffer is held, a later receive into the range is proved to come
        after the receiver has read it (``overwrites`` of the core), and what a fold overwrites is
        sent from a copy.
        """
        return (
            self.buffer.file is not None
            and task.kind is TaskKind.SEND
            and task.code < 0
            and not task.snapshot
            and self.nbytes(task) >= SHARED_PAYLOAD_BYTES
        )

    def place(self, task: Task) -> int:
        """Return the offset of that payload in the memory of :meth:`take_send`, in bytes."""
        return 0 if task.code >= 0 else self._operands.layout.place(task.start) * self._size


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A payload that lies in memory of its sender, which keeps it until it is acknowledged."""

    view: memoryview

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
        """Give up the hold on the memory."""
        if self.buffer is not None:
            self.buffer.release()


class ReceivingOp(OpTasks):
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

    def land(self, task: Task, shared: memoryview | None = None) -> SliceLanding | None:
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
            is_code = self._operands.codec(task.start) is not None
            if task.kind is TaskKind.RECEIVE_OPERAND or is_code:
                nbytes = self.nbytes(task)
                buffer = self._buffers.take(nbytes)
                return SliceLanding(task, buffer.view[:nbytes], buffer)
            return SliceLanding(task, self._native(task), self.buffer.hold())

    def _is_last_operand(self, task: Task) -> bool:
        """Return True if a fold will be done as soon as the payload of this task is there."""
        is_code = self._operands.codec(task.start) is not None
        if task.kind is not TaskKind.RECEIVE_OPERAND or is_code:
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
                self._operands.codec(task.start) is None
                or not isinstance(landing.buffer, Buffer)
                or self._decode(task, landing.buffer)
            ):
                self.complete(task)
        finally:
            landing.release()

    def _decode(self, task: Task, received: Buffer) -> bool:
        """Decode what came into the work buffer; false where the op has failed."""
        codec = self._operands.codec(task.start)
        assert codec is not None
        with self._lock:
            if self.failed:  # the work buffer may be another op's by now
                return False
            self.buffer.hold()
        try:
            code = received.view[: self._operands.code_bytes(task.stop - task.start)]
            codec.decode(code, self.range(task.start, task.stop))
        finally:
            self.buffer.release()
        self._keep_code(task, received.hold())
        return True
