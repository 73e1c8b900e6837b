"""From a node's program to a graph of tasks on chunks. Pure.

The program is an order of steps on slices; what really constrains execution are the data: a chunk
may be sent once it was written, overwritten once it was sent. This module cuts the slices into
chunks and derives these constraints, so that receiving, folding and sending of different chunks
overlap while the outcome is that of the program run in order.

A chunk boundary depends only on its step's slice and the chunk size; the two ends of an edge have
equal slices, therefore they cut the same frames.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from allfold_core.schedules.schedule import Await, Fold, Program, Receive, Send, Signal, Slice

# Received operands that may wait for their fold, per step and source: bounds the scratch memory.
FOLD_WINDOW = 4

# Operands of a fold that no other node sends.
CONTENT = -1  # of the range, at present
INPUTS = -2  # what the local ranks bring to it


class TaskKind(IntEnum):
    """The effect of a task on its element range of the work buffer."""

    CONTRIBUTE = 0  # fold the inputs of the local ranks into the range
    SEND = 1
    SIGNAL = 2
    RECEIVE = 3  # straight into the work buffer
    RECEIVE_OPERAND = 4  # into scratch memory, for a fold
    AWAIT = 5
    FOLD = 6
    FENCE = 7  # nothing; gathers the signals that later tasks wait for
    ENCODE = 8  # make the code of the range, and round the range to what it stands for


SENDING = (TaskKind.SEND, TaskKind.SIGNAL)


@dataclass(slots=True)
class Task:
    """One node of the graph.

    Attributes:
        peer: the node at the other end of a send or receive, -1 otherwise.
        operands: of a fold, in order: the index of a ``RECEIVE_OPERAND`` task, :data:`CONTENT` or
            :data:`INPUTS`.
        snapshot: of a send: a later task overwrites the range without a peer's word that the
            frame arrived, so a frame that might be sent again needs a copy.
        code: of a send on a lossy wire: the task whose code is sent, an ``ENCODE`` of this node or
            the ``RECEIVE`` of what is passed on; -1 where the range itself is sent.
        final: what it leaves in its range is a result, which nothing overwrites.
        waits_for: the number of tasks that must be done first.
        successors: the tasks that wait for this one.
    """

    index: int
    kind: TaskKind
    start: int
    stop: int
    peer: int = -1
    operands: tuple[int, ...] = ()
    snapshot: bool = False
    code: int = -1
    final: bool = False
    waits_for: int = 0
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The graph of one node's op.

    Attributes:
        tasks: by index.
        sends: by destination, the task indices of sends and signals in edge order.
        receives: by source, the task indices of receives and awaits in edge order.
        rest: the (start, stop) of results that are no task's whole range.
        waits_for: by task, how many others must be done first.
        contributions: the tasks that an op begins with, of the local ranks.
        first_destinations: whom something is sent that waits for no other task.
    """

    tasks: tuple[Task, ...]
    sends: dict[int, tuple[int, ...]]
    receives: dict[int, tuple[int, ...]]
    rest: tuple[tuple[int, int], ...] = ()
    waits_for: tuple[int, ...] = field(init=False, repr=False)
    contributions: tuple[Task, ...] = field(init=False, repr=False)
    first_destinations: frozenset[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Work out, once for all ops of this graph, how each of them begins."""
        ready = [task for task in self.tasks if not task.waits_for]
        sends = frozenset(task.peer for task in ready if task.kind in SENDING)
        contributions = tuple(task for task in ready if task.kind is TaskKind.CONTRIBUTE)
        object.__setattr__(self, "waits_for", tuple(task.waits_for for task in self.tasks))
        object.__setattr__(self, "contributions", contributions)
        object.__setattr__(self, "first_destinations", sends)


def chunks(whole: Slice, size: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each chunk of a slice; all but the last have ``size`` elements."""
    for start in range(whole.start, whole.stop, size):
        yield start, min(start + size, whole.stop)


def chunks_apart(whole: Slice, size: int, border: int | None) -> Iterator[tuple[int, int]]:
    """The same, of which none has elements on both sides of a border."""
    if border is None or not whole.start < border < whole.stop:
        yield from chunks(whole, size)
    else:
        yield from chunks(Slice(whole.start, border), size)
        yield from chunks(Slice(border, whole.stop), size)


class _Content:
    """The last writer of each element and its readers since, in segments that split on demand."""

    def __init__(self, numel: int) -> None:
        self._bounds = [0, numel]
        self.writer = [-1]
        self.readers: list[list[int]] = [[]]

    def _cut(self, position: int) -> int:
        index = bisect_left(self._bounds, position)
        if self._bounds[index] != position:
            self._bounds.insert(index, position)
            self.writer.insert(index, self.writer[index - 1])
            self.readers.insert(index, list(self.readers[index - 1]))
        return index

    def segments(self, start: int, stop: int) -> range:
        """The indices of the segments that make up [start, stop)."""
        first = self._cut(start)
        return range(first, self._cut(stop))

    def bounds(self, segment: int) -> tuple[int, int]:
        return self._bounds[segment], self._bounds[segment + 1]


class _Builder:
    def __init__(
        self,
        node: int,
        numel: int,
        chunk: int,
        encoded: bool,
        exact_from: int | None,
        eager: bool,
    ) -> None:
        self.node = node
        self.chunk = chunk
        self.exact_from = exact_from
        self.encoded = encoded
        self.eager = eager
        self.tasks: list[Task] = []
        self.content = _Content(numel) if numel else None
        self.sends: dict[int, list[int]] = defaultdict(list)
        self.receives: dict[int, list[int]] = defaultdict(list)
        self.fence = -1
        self.awaits: list[int] = []

    def chunks(self, whole: Slice) -> Iterator[tuple[int, int]]:
        """The (start, stop) of each chunk of a slice."""
        return chunks_apart(whole, self.chunk, self.exact_from)

    def is_encoded(self, start: int) -> bool:
        """True if a chunk that begins there is sent as a code."""
        return self.encoded and (self.exact_from is None or start < self.exact_from)

    def add(self, kind: TaskKind, start: int, stop: int, peer: int = -1) -> Task:
        task = Task(len(self.tasks), kind, start, stop, peer)
        self.tasks.append(task)
        return task

    def order(self, first: int, then: Task) -> None:
        """``then`` starts after ``first``; a negative number stands for no task."""
        if first >= 0 and then.index not in self.tasks[first].successors[-1:]:
            self.tasks[first].successors.append(then.index)
            then.waits_for += 1

    def after_fence(self, task: Task) -> Task:
        """Make ``task`` wait for every signal that the program awaits before it."""
        if self.awaits:
            fence = self.add(TaskKind.FENCE, 0, 0)
            for index in self.awaits:
                self.order(index, fence)
            self.awaits = []
            self.fence = fence.index
        self.order(self.fence, task)
        return task

    def read(self, task: Task) -> None:
        """``task`` reads its range: it waits for the writers, and later writers wait for it."""
        assert self.content is not None
        for segment in self.content.segments(task.start, task.stop):
            if self.content.writer[segment] < 0:
                self.contribute(segment)
            self.order(self.content.writer[segment], task)
            self.content.readers[segment].append(task.index)

    def write(self, task: Task) -> None:
        """``task`` overwrites its range: it waits for the writers and readers before it."""
        assert self.content is not None
        for segment in self.content.segments(task.start, task.stop):
            self.order(self.content.writer[segment], task)
            for reader in self.content.readers[segment]:
                if reader != task.index:
                    self.order(reader, task)
                    if task.kind is TaskKind.FOLD:
                        # A code is not overwritten, whatever happens to its range.
                        self.tasks[reader].snapshot = self.tasks[reader].code < 0
            self.content.writer[segment] = task.index
            self.content.readers[segment] = []

    def contribute(self, segment: int) -> None:
        assert self.content is not None
        task = self.add(TaskKind.CONTRIBUTE, *self.content.bounds(segment))
        self.content.writer[segment] = task.index

    def send(self, step: Send) -> None:
        for start, stop in self.chunks(step.slice):
            code = self.code(start, stop) if self.is_encoded(start) else -1
            task = self.add(TaskKind.SEND, start, stop, step.to)
            task.code = code
            self.read(self.after_fence(task))
            self.sends[step.to].append(task.index)

    def code(self, start: int, stop: int) -> int:
        """The task that has the code of the range's present content; made where there is none.

        What came in a code is passed on in the same one, so all nodes decode the same bytes.
        """
        assert self.content is not None
        writers = {self.content.writer[each] for each in self.content.segments(start, stop)}
        if len(writers) == 1 and (writer := writers.pop()) >= 0:
            task = self.tasks[writer]
            whole = (task.start, task.stop) == (start, stop)
            if whole and task.kind in (TaskKind.RECEIVE, TaskKind.ENCODE):
                return writer
        task = self.after_fence(self.add(TaskKind.ENCODE, start, stop))
        self.read(task)
        self.write(task)
        return task.index

    def receive(self, step: Receive) -> None:
        for start, stop in self.chunks(step.slice):
            task = self.add(TaskKind.RECEIVE, start, stop, step.source)
            self.write(self.after_fence(task))
            self.receives[step.source].append(task.index)

    def fold(self, step: Fold) -> None:
        folded: list[int] = []
        for start, stop in self.chunks(step.slice):
            operands: list[int] = []
            for operand in step.operands:
                if operand == self.node:
                    operands.append(self.own(start, stop))
                    continue
                received = self.after_fence(
                    self.add(TaskKind.RECEIVE_OPERAND, start, stop, operand)
                )
                if len(folded) >= FOLD_WINDOW:
                    self.order(folded[-FOLD_WINDOW], received)
                self.receives[operand].append(received.index)
                operands.append(received.index)
            task = self.after_fence(self.add(TaskKind.FOLD, start, stop))
            task.operands = tuple(operands)
            for index in operands:
                self.order(index, task)
            if CONTENT in operands:
                self.read(task)
            self.write(task)
            folded.append(task.index)

    def own(self, start: int, stop: int) -> int:
        """This node's operand of a fold. Inputs that are only folded are not copied first."""
        assert self.content is not None
        segments = self.content.segments(start, stop)
        untouched = all(self.content.writer[each] < 0 for each in segments)
        return INPUTS if untouched and not self.eager else CONTENT

    def signal(self, step: Signal) -> None:
        task = self.add(TaskKind.SIGNAL, 0, 0, step.to)
        self.after_fence(task)
        for earlier in self.tasks[: task.index]:
            # What another task waits for is waited for through it, unless that is a signal too.
            leads_on = any(
                self.tasks[each].kind is not TaskKind.SIGNAL for each in earlier.successors
            )
            if not leads_on and earlier.kind is not TaskKind.SIGNAL:
                self.order(earlier.index, task)
        self.sends[step.to].append(task.index)

    def await_(self, step: Await) -> None:
        task = self.add(TaskKind.AWAIT, 0, 0, step.source)
        self.order(self.fence, task)
        self.receives[step.source].append(task.index)
        self.awaits.append(task.index)

    def complete(self, result: Slice) -> None:
        """Contribute what no step has touched, e.g. everything where there is but one node."""
        assert self.content is not None
        for bounds in self.chunks(result):
            for segment in self.content.segments(*bounds):
                if self.content.writer[segment] < 0:
                    self.contribute(segment)

    def mark_final(self, results: Iterable[Slice]) -> list[tuple[int, int]]:
        """Mark the tasks whose ranges are results; the (start, stop) of those of no such task."""
        assert self.content is not None
        written: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for result in results:
            for segment in self.content.segments(result.start, result.stop):
                bounds = self.content.bounds(segment)
                written[self.content.writer[segment]].append(bounds)
        rest: list[tuple[int, int]] = []
        for writer, ranges in written.items():
            task = self.tasks[writer]
            task.final = sum(stop - start for start, stop in ranges) == task.stop - task.start
            if not task.final:
                rest.extend(ranges)
        return rest


def build(
    program: Program,
    *,
    node: int,
    numel: int,
    chunk: int,
    results: Iterable[Slice] = (),
    encoded: bool = False,
    exact_from: int | None = None,
    eager: bool = False,
) -> TaskGraph:
    """The task graph of ``node``'s program.

    Args:
        program: the steps of this node.
        node: its index, which stands for the own content in a fold's operands.
        numel: elements of the index space.
        chunk: elements of a chunk, at least 1; equal on all nodes.
        results: what the work buffer must hold in the end.
        encoded: whether what is sent must be encoded first.
        exact_from: from which element on nothing is encoded; ``None`` if everything may be.
        eager: whether the inputs are contributed before anything is folded with them, because they
            are not where folds are done.
    """
    if chunk < 1:
        raise ValueError(f"a chunk has at least 1 element, got {chunk}")
    builder = _Builder(node, numel, chunk, encoded, exact_from, eager)
    for step in program:
        match step:
            case Send():
                builder.send(step)
            case Receive():
                builder.receive(step)
            case Fold():
                builder.fold(step)
            case Signal():
                builder.signal(step)
            case Await():
                builder.await_(step)
    due = [result for result in results if result]
    for result in due:
        builder.complete(result)
    rest = builder.mark_final(due) if due else []
    return TaskGraph(
        tuple(builder.tasks),
        {peer: tuple(order) for peer, order in builder.sends.items()},
        {peer: tuple(order) for peer, order in builder.receives.items()},
        tuple(rest),
    )
