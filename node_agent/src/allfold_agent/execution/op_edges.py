"""An op as an edge sees it: the sink of what comes from a node, the source of what goes there."""

from __future__ import annotations

from time import monotonic

from allfold_agent.compilation.task_graph import Task, TaskKind
from allfold_agent.edges.outgoing import Payload
from allfold_agent.execution.executor import Executor
from allfold_agent.execution.transfers import SliceLanding
from allfold_core.errors import PeerSentIncoherentTensor
from allfold_core.protocol.frames import FrameHeader, FrameType


class OpReceiver:
    """An op's part of the edge from one node. One thread at a time uses it: who reads the edge.

    Args:
        source: the index of the node.
        fingerprint: what every frame must have; else the calls of the two nodes differ.

    Attributes:
        heard_at: when the first frame was taken in (monotonic); 0.0 for not yet.
    """

    def __init__(self, executor: Executor, source: int, fingerprint: int) -> None:
        self.fingerprint = fingerprint
        self._executor = executor
        self._order = executor.graph.receives.get(source, ())
        self._next = 0
        self.heard_at = 0.0

    def is_ready(self) -> bool:
        executor, order, position = self._executor, self._order, self._next
        return executor.failed or position == len(order) or not executor.waits(order[position])

    def admit(self, header: FrameHeader, shared: memoryview | None) -> SliceLanding | None:
        """Return the landing of a frame; ``None`` if the op failed. Not before :meth:`is_ready`.

        Raises:
            PeerSentIncoherentTensor: this is not the frame that the edge has to bring next.
        """
        task = self._expect()
        if task is None or not self._fits(task, header):
            expected = "no more frames" if task is None else self._describe(task)
            raise PeerSentIncoherentTensor(
                f"op {header.seq} got {header.length} bytes at element {header.offset}, "
                f"expected {expected}"
            )
        self._executor.lower_floor(header.seq - header.behind)
        try:
            return self._executor.land(task, shared)
        except BaseException:
            self._next -= 1  # the frame comes again, on a new connection
            raise

    def _expect(self) -> Task | None:
        """The task that the frame feeds; ``None`` when no more are expected."""
        position = self._next
        if position == len(self._order):
            return None
        if not position:
            self.heard_at = monotonic()
        self._next = position + 1
        return self._executor.graph.tasks[self._order[position]]

    def _fits(self, task: Task, header: FrameHeader) -> bool:
        kind = FrameType.SIGNAL if task.kind is TaskKind.AWAIT else FrameType.DATA
        expected = (kind, task.start, self._executor.nbytes(task))
        return (header.type, header.offset, header.length) == expected

    def _describe(self, task: Task) -> str:
        return f"{self._executor.nbytes(task)} bytes at element {task.start}"

    def retract(self, landing: SliceLanding) -> None:
        """Take back an admitted frame whose payload broke off; it will be sent again."""
        self._next -= 1
        landing.release()

    def received(self, landing: SliceLanding) -> None:
        self._executor.received(landing)

    def all_received(self) -> bool:
        """Return True if the node has sent its last frame of the op."""
        return self._next == len(self._order)


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
