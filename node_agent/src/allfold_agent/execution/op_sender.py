"""The source that an op is to an edge: what it sends to one node, in the order of its schedule."""

from __future__ import annotations

from allfold_agent.compilation.task_graph import TaskKind
from allfold_agent.edges.outgoing import Payload
from allfold_agent.execution.executor import Executor
from allfold_core.wire.frames import FrameType


class OpSender:
    """An op's part of the edge to one node.

    Args:
        destination: the index of the node.
        stamp: of the attempt that the executor runs.
        fingerprint: what the other node compares with that of its own ranks.
    """

    def __init__(
        self, executor: Executor, destination: int, seq: int, stamp: int, fingerprint: int
    ) -> None:
        self.seq = seq
        self.stamp = stamp
        self.fingerprint = fingerprint
        self._executor = executor
        self._destination = destination

    @property
    def behind(self) -> int:
        return self.seq - self._executor.floor

    def is_finished(self) -> bool:
        return self._executor.all_sent(self._destination)

    def is_ready(self) -> bool:
        return self._executor.send_is_ready(self._destination)

    def next_size(self) -> int:
        task = self._executor.next_send(self._destination)
        return 0 if task is None else self._executor.nbytes(task)

    def next_is_shared(self) -> bool:
        task = self._executor.next_send(self._destination)
        return task is not None and self._executor.is_shared(task)

    def take(self) -> Payload | None:
        executor = self._executor
        taken = executor.take_send(self._destination)
        if taken is None:
            return None
        task, memory = taken
        signal = task.kind is TaskKind.SIGNAL

        def payload() -> memoryview | bytes:
            if signal:
                return b""
            return executor.payload(task, memory)

        return Payload(
            FrameType.SIGNAL if signal else FrameType.DATA,
            task.start,
            payload,
            lambda: executor.complete(task),
            memory,
            executor.place(task),
            executor.is_shared(task),
        )
