"""One op's run through its dataflow on this node.

No thread of its own: whoever completes a task (a worker, an edge's thread) carries on with what
became ready. A fold runs in the thread that received its last operand, while that is in cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition, RLock

import torch

from allfold_agent.buffers import Buffer, BufferPool
from allfold_agent.dataflow import INPUTS, Dataflow, Task, TaskKind
from allfold_agent.job import Job
from allfold_core.errors import GpuFailed, PeerSentIncoherentTensor
from allfold_core.frames import FrameHeader, FrameType
from allfold_core.parts import Piece

log = logging.getLogger(__name__)

HandOut = Callable[[Sequence[Piece], Callable[[Exception | None], None]], None]

_RECEIVING = (TaskKind.RECEIVE, TaskKind.RECEIVE_OPERAND, TaskKind.AWAIT)
_SENDING = (TaskKind.SEND, TaskKind.SIGNAL)
_COMPUTING = (TaskKind.FOLD, TaskKind.ENCODE)


@dataclass(slots=True)
class Landing:
    """Where the payload of a frame goes; released by :meth:`Exchange.received`."""

    task: Task
    view: memoryview
    buffer: Buffer | None = None

    def release(self) -> None:
        """Let go of the memory."""
        if self.buffer is not None:
            self.buffer.release()


def _nothing() -> None:
    """What an exchange that is over does in the end."""


def _ignore(error: Exception) -> None:
    """What an exchange that is over does when something fails all the same."""


class Exchange:
    """The state of one op: what is done, what is ready, and the memory that it works in.

    Args:
        flow: the task graph of this node.
        job: the op's inputs, and how it computes.
        buffers: where work and scratch memory come from.
        on_sendable: called with a destination when a send to it may have become ready.
        on_receivable: called with a source when what it sends next can be received.
        on_finished: called once, when every task is done.
        on_failed: called when this node cannot compute what it has to.
        early: whether results are handed out chunk by chunk. Only for ops whose results do not go
            where inputs lie: those stay untouched until it is certain that the op succeeds.
        hand_out: has a GPU do so, where ranks have their memory there: given what of the result is
            there, and who is told when the ranks have it.
    """

    def __init__(
        self,
        flow: Dataflow,
        job: Job,
        buffers: BufferPool,
        on_sendable: Callable[[int], None],
        on_receivable: Callable[[int], None],
        on_finished: Callable[[], None],
        on_failed: Callable[[Exception], None],
        early: bool = False,
        hand_out: HandOut | None = None,
    ) -> None:
        self.flow = flow
        self.early = early
        self.failed = False
        self._job = job
        self._arithmetic = job.arithmetic
        self._buffers = buffers
        self._on_sendable = on_sendable
        self._on_receivable = on_receivable
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._on_gpu = hand_out
        self._size = job.arithmetic.kept_itemsize
        self.buffer = buffers.take(job.layout.held * self._size, shared=bool(flow.sends))
        self.work = job.arithmetic.kept(self.buffer.bytes, job.layout.held)
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._waits_for = [task.waits_for for task in flow.tasks]
        self._remaining = len(flow.tasks)
        if early:
            self._remaining += sum(task.final for task in flow.tasks)
        self._handing_out = 0
        self._after_handing_out: list[Callable[[], None]] = []
        self._next_send = dict.fromkeys(flow.sends, 0)
        self._next_receive = dict.fromkeys(flow.receives, 0)
        self._scratch: dict[int, Buffer] = {}
        self._codes: dict[int, Buffer] = {}

    # Running

    def start(self) -> list[Task]:
        """Begin: returns the contributions, which the caller has someone :meth:`contribute`."""
        if not self.flow.tasks:
            self._on_finished()
            return []
        ready = [task for task in self.flow.tasks if not task.waits_for]
        for destination in {task.peer for task in ready if task.kind in _SENDING}:
            self._on_sendable(destination)
        contributions = [task for task in ready if task.kind is TaskKind.CONTRIBUTE]
        with self._lock:
            if self.failed:  # its memory may have been given up already
                return []
            for _ in contributions:
                self.buffer.hold()
        return contributions

    def contribute(self, task: Task) -> None:
        """Fold the local inputs into the task's range of the work buffer."""
        job, problem = self._job, None
        try:
            if not self.failed:
                self._fold_inputs(task, job)
        except Exception as error:  # noqa: BLE001 - it is handed on
            problem = error
        self.contributed(task, problem)

    def contributed(self, task: Task, error: Exception | None) -> None:
        """The local inputs are folded into the task's range, or cannot be.

        After an error of a GPU the work buffer is nobody's any more, as that may still write to it.
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

    def _fold_inputs(self, task: Task, job: Job) -> None:
        for part, start, stop in job.layout.parts_in(task.start, task.stop):
            if part.sources:
                inputs = job.inputs_of(part, start, stop)
                job.arithmetic.fold_inputs(self.range(start, stop), inputs)

    def pieces(self, task: Task) -> list[Piece]:
        """The parts in a task's range."""
        return list(self._job.layout.parts_in(task.start, task.stop))

    def range(self, start: int, stop: int) -> torch.Tensor:
        """A range of the index space in the work buffer."""
        place = self._job.layout.place(start)
        return self.work[place : place + stop - start]

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
                job = self._job
                if own:
                    self.buffer.hold()
            if own and not self._compute_all(own, job):
                return
            todo = own
        for destination in destinations:
            self._on_sendable(destination)
        for source in sources:
            self._on_receivable(source)
        if results:
            self._hand_out(results, job)
        elif finished:
            self._on_finished()

    def _hand_out(self, tasks: Sequence[Task], job: Job) -> None:
        """Give the local ranks what is ready of their results."""
        with self._lock:
            if self.failed:
                return
            self._handing_out += 1
            self.buffer.hold()
            on_gpu = self._on_gpu
        layout = job.layout
        pieces = [each for task in tasks for each in layout.parts_in(task.start, task.stop)]
        due = [(part, start, stop) for part, start, stop in pieces if part.targets]
        if on_gpu is not None:
            on_gpu(due, partial(self._handed_out, len(tasks)))
            return
        error: Exception | None = None
        try:
            for part, start, stop in due:
                job.hand_out(part, start, stop, self.range(start, stop))
        except Exception as problem:  # noqa: BLE001 - it is handed on
            error = problem
        self._handed_out(len(tasks), error)

    def _handed_out(self, count: int, error: Exception | None) -> None:
        """The local ranks have the results of so many tasks, or cannot get them."""
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

    def _compute_all(self, tasks: Sequence[Task], job: Job) -> bool:
        """Fold and encode, with the work buffer held for it; false where that failed."""
        try:
            for task in tasks:
                if task.kind is TaskKind.FOLD:
                    self._fold(task, job)
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
        tasks = self.flow.tasks
        for index in done.successors:
            self._waits_for[index] -= 1
            if self._waits_for[index]:
                continue
            task = tasks[index]
            if task.kind in _COMPUTING:
                own.append(task)
            elif task.kind in _SENDING:
                destinations.add(task.peer)
            elif task.kind in _RECEIVING:
                sources.add(task.peer)
                self._changed.notify_all()
            elif task.kind is TaskKind.FENCE:
                self._count(task, own, destinations, sources)

    def _fold(self, task: Task, job: Job) -> None:
        part = self.range(task.start, task.stop)
        scratch = [self._scratch.pop(index) for index in task.operands if index >= 0]
        received = iter(scratch)
        operands = [
            self._decoded(next(received), part.numel()) if index >= 0 else part
            for index in task.operands
        ]
        if INPUTS in task.operands:
            operands[task.operands.index(INPUTS)] = self._own(task, job, part)
        self._arithmetic.fold(part, operands)
        for buffer in scratch:
            buffer.release()

    def _own(self, task: Task, job: Job, part: torch.Tensor) -> torch.Tensor:
        """What the local ranks bring to a range: their memory itself, where that is all."""
        alone = job.only_input(task.start, task.stop)
        if alone is not None:
            return alone
        self._fold_inputs(task, job)
        return part

    def _decoded(self, received: Buffer, numel: int) -> torch.Tensor:
        codec = self._job.codec
        if codec is None:
            return self._arithmetic.kept(received.bytes, numel)
        values = torch.empty(numel, dtype=self._arithmetic.kept_dtype)
        codec.decode(received.bytes[: self._job.wire_bytes(numel)], values)
        return values

    def _encode(self, task: Task) -> None:
        codec = self._job.codec
        assert codec is not None
        values = self.range(task.start, task.stop)
        buffer = self._buffers.take(self.nbytes(task))
        code = buffer.bytes[: self.nbytes(task)]
        residual = self._job.residual
        if residual is None:
            codec.encode(values, code)
        else:
            residual.encode(self._job.layout.place(task.start), values, code, codec)
        self._keep_code(task, buffer)

    def _keep_code(self, task: Task, buffer: Buffer) -> None:
        """Keep a code for those that send it, until the op is over."""
        with self._lock:
            if not self.failed:
                self._codes[task.index] = buffer
                return
        buffer.release()

    def fail(self, then: Callable[[], None]) -> None:
        """Stop: nothing is sent, received, folded or handed out any more. Wakes whoever waits.

        Args:
            then: called, maybe by another thread, when nobody writes to the memory of ranks any
                more. Ranks that are told of the failure may use theirs again.
        """
        with self._lock:
            self.failed = True
            self._changed.notify_all()
            if self._handing_out:
                self._after_handing_out.append(then)
                return
        then()

    def release(self) -> None:
        """Give up the op's hold on its memory; frames in flight keep theirs."""
        self.buffer.release()
        with self._lock:
            codes, self._codes = self._codes, {}
        for buffer in codes.values():
            buffer.release()
        # Frames may keep this object for a while; it must not keep the memory of ranks.
        self._job = self._job.without_inputs()
        self._on_gpu = None
        self._on_finished = _nothing
        self._on_failed = _ignore

    # Sending

    def take_send(self, destination: int) -> tuple[Task, Buffer] | None:
        """The next send on an edge, in edge order, if it is ready, and its memory, held for it."""
        order = self.flow.sends[destination]
        with self._lock:
            position = self._next_send[destination]
            if self.failed or position == len(order) or self._waits_for[order[position]]:
                return None
            self._next_send[destination] = position + 1
            task = self.flow.tasks[order[position]]
            memory = self.buffer if task.code < 0 else self._codes[task.code]
            return task, memory.hold()

    def next_send(self, destination: int) -> Task | None:
        """The send that comes next on an edge, ready or not."""
        order = self.flow.sends[destination]
        position = self._next_send[destination]
        return self.flow.tasks[order[position]] if position < len(order) else None

    def send_is_ready(self, destination: int) -> bool:
        """Whether the next send on an edge is ready."""
        task = self.next_send(destination)
        return task is not None and not self.failed and not self._waits_for[task.index]

    def all_sent(self, destination: int) -> bool:
        """Whether nothing is left to take for an edge."""
        return self.failed or self._next_send[destination] == len(self.flow.sends[destination])

    def payload(self, task: Task, memory: Buffer) -> memoryview | bytes:
        """The bytes that a send puts on the wire."""
        view = memory.view[: self.nbytes(task)] if task.code >= 0 else self._native(task)
        return bytes(view) if task.snapshot else view

    def place(self, task: Task) -> int:
        """Where that payload begins in the memory of :meth:`take_send`."""
        return 0 if task.code >= 0 else self._job.layout.place(task.start) * self._size

    def _native(self, task: Task) -> memoryview:
        start = self._job.layout.place(task.start)
        return self.buffer.view[start * self._size : (start + task.stop - task.start) * self._size]

    # Receiving

    def is_ready(self, source: int) -> bool:
        """Whether :meth:`admit` would not wait."""
        order = self.flow.receives.get(source, ())
        position = self._next_receive.get(source, 0)
        return self.failed or position == len(order) or not self._waits_for[order[position]]

    def admit(self, source: int, header: FrameHeader) -> Landing | None:
        """Where to receive a frame's payload, once it may be overwritten; ``None`` if failed.

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
        order = self.flow.receives.get(source, ())
        position = self._next_receive.get(source, 0)
        if position == len(order):
            return None
        self._next_receive[source] = position + 1
        return self.flow.tasks[order[position]]

    def _fits(self, task: Task, header: FrameHeader) -> bool:
        kind = FrameType.SIGNAL if task.kind is TaskKind.AWAIT else FrameType.DATA
        expected = (kind, task.start, self.nbytes(task))
        return (header.type, header.offset, header.length) == expected

    def _describe(self, task: Task) -> str:
        return f"{self.nbytes(task)} bytes at element {task.start}"

    def all_received(self, source: int) -> bool:
        """Whether the last frame of an edge has come."""
        return self._next_receive.get(source, 0) == len(self.flow.receives.get(source, ()))

    def awaited_sources(self) -> list[int]:
        """The nodes from which frames are still to come."""
        return [source for source in self.flow.receives if not self.all_received(source)]

    def retract(self, source: int, landing: Landing) -> None:
        """The payload of an admitted frame broke off; it will come again."""
        self._next_receive[source] -= 1
        landing.release()

    def nbytes(self, task: Task) -> int:
        """The payload size of a frame for this task."""
        return self._job.wire_bytes(task.stop - task.start)

    def _land(self, task: Task) -> Landing | None:
        with self._lock:
            while self._waits_for[task.index] and not self.failed:
                self._changed.wait(timeout=1.0)  # a deadline or a loss sets `failed`
            if self.failed:
                return None
            if task.kind is TaskKind.AWAIT:
                return Landing(task, memoryview(b""))
            if task.kind is TaskKind.RECEIVE_OPERAND or self._job.codec is not None:
                buffer = self._buffers.take(self.nbytes(task))
                return Landing(task, buffer.view[: self.nbytes(task)], buffer)
            return Landing(task, self._native(task), self.buffer.hold())

    def received(self, landing: Landing) -> None:
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
                self._job.codec is None
                or landing.buffer is None
                or self._decode(task, landing.buffer)
            ):
                self.complete(task)
        finally:
            landing.release()

    def _decode(self, task: Task, received: Buffer) -> bool:
        """Decode what came into the work buffer; false where the op has failed."""
        codec = self._job.codec
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
