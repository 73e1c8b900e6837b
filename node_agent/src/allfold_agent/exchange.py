"""One op's run through its dataflow on this node.

No thread of its own: whoever completes a task (a worker, an edge's thread) carries on with what
became ready. A fold runs in the thread that received its last operand, while that is in cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

import torch

from allfold_agent.buffers import Buffer, BufferPool
from allfold_agent.dataflow import Dataflow, Task, TaskKind
from allfold_agent.folding import Arithmetic

log = logging.getLogger(__name__)

_RECEIVING = (TaskKind.RECEIVE, TaskKind.RECEIVE_OPERAND, TaskKind.AWAIT)
_SENDING = (TaskKind.SEND, TaskKind.SIGNAL)


@dataclass(slots=True)
class Landing:
    """Where the payload of a frame goes; released by :meth:`Exchange.received`."""

    task: Task
    view: memoryview
    buffer: Buffer


def _nothing() -> None:
    """What an exchange that is over does in the end."""


def _ignore(error: Exception) -> None:
    """What an exchange that is over does when something fails all the same."""


class Exchange:
    """The state of one op: what is done, what is ready, and the memory that it works in.

    Args:
        flow: the task graph of this node.
        arithmetic: how the op computes.
        numel: elements of the work buffer.
        inputs: the contributing inputs of the local ranks, flat, in rank order.
        buffers: where work and scratch memory come from.
        on_sendable: called with a destination when a send to it may have become ready.
        on_finished: called once, when every task is done.
        on_failed: called when this node cannot compute what it has to.
    """

    def __init__(
        self,
        flow: Dataflow,
        arithmetic: Arithmetic,
        numel: int,
        inputs: Sequence[torch.Tensor],
        buffers: BufferPool,
        on_sendable: Callable[[int], None],
        on_finished: Callable[[], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.flow = flow
        self.failed = False
        self._arithmetic = arithmetic
        self._inputs = inputs
        self._buffers = buffers
        self._on_sendable = on_sendable
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._size = arithmetic.kept_itemsize
        self.buffer = buffers.take(numel * self._size)
        self.work = arithmetic.kept(self.buffer.bytes, numel)
        self._changed = Condition()
        self._waits_for = [task.waits_for for task in flow.tasks]
        self._remaining = len(flow.tasks)
        self._next_send = dict.fromkeys(flow.sends, 0)
        self._next_receive = dict.fromkeys(flow.receives, 0)
        self._scratch: dict[int, Buffer] = {}

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
        with self._changed:
            if self.failed:  # its memory may have been given up already
                return []
            for _ in contributions:
                self.buffer.hold()
        return contributions

    def contribute(self, task: Task) -> None:
        """Fold the local inputs into the task's range of the work buffer."""
        inputs = self._inputs
        try:
            if self.failed:
                return
            part = slice(task.start, task.stop)
            try:
                self._arithmetic.fold(self.work[part], [each[part] for each in inputs])
            except Exception as error:
                log.exception("the inputs of an op cannot be folded")
                self._on_failed(error)
                return
            self.complete(task)
        finally:
            self.buffer.release()

    def complete(self, task: Task) -> None:
        """Count a task as done and do what became ready by it."""
        todo = [task]
        destinations: set[int] = set()
        finished = False
        while todo:
            folds: list[Task] = []
            with self._changed:
                if self.failed:
                    return
                for done in todo:
                    self._count(done, folds, destinations)
                finished = self._remaining == 0
                if folds:
                    # A verdict may end the op at any moment, and with it the op's own hold.
                    self.buffer.hold()
            if folds and not self._fold_all(folds):
                return
            todo = folds
        for destination in destinations:
            self._on_sendable(destination)
        if finished:
            self._on_finished()

    def _fold_all(self, folds: Sequence[Task]) -> bool:
        """Fold, with the work buffer held for it; false where that failed."""
        try:
            for fold in folds:
                self._fold(fold)
        except Exception as error:
            log.exception("what other nodes sent cannot be folded")
            self._on_failed(error)
            return False
        finally:
            self.buffer.release()
        return True

    def _count(self, done: Task, folds: list[Task], destinations: set[int]) -> None:
        self._remaining -= 1
        tasks = self.flow.tasks
        for index in done.successors:
            self._waits_for[index] -= 1
            if self._waits_for[index]:
                continue
            task = tasks[index]
            if task.kind is TaskKind.FOLD:
                folds.append(task)
            elif task.kind in _SENDING:
                destinations.add(task.peer)
            elif task.kind in _RECEIVING:
                self._changed.notify_all()
            elif task.kind is TaskKind.FENCE:
                self._count(task, folds, destinations)

    def _fold(self, task: Task) -> None:
        part = self.work[task.start : task.stop]
        numel = task.stop - task.start
        scratch = [self._scratch.pop(index) for index in task.operands if index >= 0]
        received = iter(scratch)
        operands = [
            part if index < 0 else self._arithmetic.kept(next(received).bytes, numel)
            for index in task.operands
        ]
        self._arithmetic.fold(part, operands)
        for buffer in scratch:
            buffer.release()

    def fail(self) -> None:
        """Stop: nothing is sent, received or folded any more. Wakes whoever waits."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()

    def release(self) -> None:
        """Give up the op's hold on its memory; frames in flight keep theirs."""
        self.buffer.release()
        # Frames may keep this object for a while; it must not keep the memory of ranks.
        self._inputs = ()
        self._on_finished = _nothing
        self._on_failed = _ignore

    # Sending

    def take_send(self, destination: int) -> Task | None:
        """The next send on an edge, in edge order, if it is ready; holds :attr:`buffer` for it."""
        order = self.flow.sends[destination]
        with self._changed:
            position = self._next_send[destination]
            if self.failed or position == len(order) or self._waits_for[order[position]]:
                return None
            self._next_send[destination] = position + 1
            self.buffer.hold()
            return self.flow.tasks[order[position]]

    def next_send(self, destination: int) -> Task | None:
        """The send that comes next on an edge, ready or not."""
        order = self.flow.sends[destination]
        position = self._next_send[destination]
        return self.flow.tasks[order[position]] if position < len(order) else None

    def peek_send(self, destination: int) -> bool:
        """Whether the next send on an edge is ready."""
        task = self.next_send(destination)
        return task is not None and not self.failed and not self._waits_for[task.index]

    def all_sent(self, destination: int) -> bool:
        """Whether nothing is left to take for an edge."""
        return self.failed or self._next_send[destination] == len(self.flow.sends[destination])

    def payload(self, task: Task) -> memoryview:
        """The bytes of a task's range of the work buffer."""
        return self.buffer.view[task.start * self._size : task.stop * self._size]

    # Receiving

    def expect(self, source: int) -> Task | None:
        """The next task that an edge feeds, in edge order; ``None`` when it expects no more."""
        order = self.flow.receives.get(source, ())
        position = self._next_receive.get(source, 0)
        if position == len(order):
            return None
        self._next_receive[source] = position + 1
        return self.flow.tasks[order[position]]

    def all_expected(self, source: int) -> bool:
        """Whether the last frame of an edge has come."""
        return self._next_receive.get(source, 0) == len(self.flow.receives.get(source, ()))

    def awaited_sources(self) -> list[int]:
        """The nodes from which frames are still to come."""
        return [source for source in self.flow.receives if not self.all_expected(source)]

    def unexpect(self, source: int) -> None:
        """The payload of the expected task broke off; it will come again."""
        self._next_receive[source] -= 1

    def nbytes(self, task: Task) -> int:
        """The payload size of a frame for this task."""
        return (task.stop - task.start) * self._size

    def land(self, task: Task) -> Landing | None:
        """Where to receive a task's payload, once it may be overwritten; ``None`` if failed."""
        with self._changed:
            while self._waits_for[task.index] and not self.failed:
                self._changed.wait(timeout=1.0)  # a deadline or a loss sets `failed`
            if self.failed:
                return None
            if task.kind is TaskKind.RECEIVE_OPERAND:
                buffer = self._buffers.take(self.nbytes(task))
                return Landing(task, buffer.view[: self.nbytes(task)], buffer)
            return Landing(task, self.payload(task), self.buffer.hold())

    def received(self, landing: Landing) -> None:
        """The payload has landed: go on."""
        if landing.task.kind is TaskKind.RECEIVE_OPERAND:
            with self._changed:
                self._scratch[landing.task.index] = landing.buffer
            self.complete(landing.task)
            return
        try:
            self.complete(landing.task)
        finally:
            landing.buffer.release()
