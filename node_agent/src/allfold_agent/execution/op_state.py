"""The state of one op on this node that running, sending and receiving share."""

from __future__ import annotations

from threading import Condition

import torch

from allfold_agent.arithmetic.operands import Operands
from allfold_agent.compilation.task_graph import Task, TaskGraph
from allfold_agent.runtime.buffers import Buffer, BufferPool
from allfold_agent.runtime.locks import make_rlock


class OpState:
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
        self.work = operands.arithmetic.kept(self.buffer.bytes, operands.layout.held)
        self._lock = make_rlock("executor")
        self._changed: Condition | None = None  # made by the first thread that waits
        self._waits_for = list(graph.waits_for)
        self._codes: dict[int, Buffer] = {}

    def range(self, start: int, stop: int) -> torch.Tensor:
        """A range of the index space in the work buffer."""
        place = self._operands.layout.place(start)
        return self.work[place : place + stop - start]

    def nbytes(self, task: Task) -> int:
        """The payload size of a frame for this task."""
        return self._operands.wire_bytes(task.stop - task.start)

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
