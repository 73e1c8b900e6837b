"""The sends of one op on this node, in the order of each edge."""

from __future__ import annotations

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import Task, TaskGraph, TaskKind
from allfold_agent.execution.op_state import OpState
from allfold_agent.runtime.buffers import Buffer, BufferPool

# To copy fewer takes no longer than to say where they are.
SHARED_PAYLOAD_BYTES = 16 * 1024


class SendingOp(OpState):
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
