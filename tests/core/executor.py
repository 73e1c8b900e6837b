"""Schedules run with numbers: by an executor that knows nothing of the verifier.

It takes each program strictly in order, with unbounded edges, and a random node goes next.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce
from random import Random

import numpy as np

from allfold_core.schedules.schedule import Await, Fold, Program, Receive, Send, Signal, Slice

Row = np.ndarray
Edges = dict[tuple[int, int], deque[Row]]
SIGNAL = np.empty(0)


class Worker:
    """One node's program, work buffer and place in the program.

    Args:
        me: the node.
        program: its steps.
        content: its work buffer, which is changed.
        place: where an element of the index space lies in the buffer.
    """

    def __init__(
        self, me: int, program: Program, content: Row, place: Callable[[int], int] = int
    ) -> None:
        self.me = me
        self.program = program
        self.content = content
        self.place = place
        self.done = 0

    def view(self, part: Slice) -> Row:
        start = self.place(part.start)
        found = self.content[start : start + len(part)]
        assert len(found) == len(part), "a slice leaves the work buffer"
        return found

    def runnable(self, edges: Edges) -> bool:
        if self.done == len(self.program):
            return False
        match self.program[self.done]:
            case Receive(source=source) | Await(source):
                return bool(edges[source, self.me])
            case Fold(operands=operands):
                return all(one == self.me or edges[one, self.me] for one in operands)
        return True

    def step(self, edges: Edges) -> None:
        step = self.program[self.done]
        self.done += 1
        match step:
            case Send(part, to):
                edges[self.me, to].append(self.view(part).copy())
            case Signal(to):
                edges[self.me, to].append(SIGNAL)
            case Await(source):
                assert edges[source, self.me].popleft() is SIGNAL
            case Receive(part, source):
                self._write(part, edges[source, self.me].popleft())
            case Fold(part, operands):
                rows = [
                    self.view(part) if one == self.me else edges[one, self.me].popleft()
                    for one in operands
                ]
                self._write(part, fold_rows(rows))

    def _write(self, part: Slice, row: Row) -> None:
        assert len(row) == len(part), "a message of another size"
        self.view(part)[:] = row


def fold_rows(rows: Sequence[Row]) -> Row:
    """The left fold: one addition after the other."""
    return reduce(np.add, rows)


def execute(workers: Sequence[Worker], random: Random) -> None:
    """Run all programs to their ends."""
    edges: Edges = defaultdict(deque)
    while ready := [worker for worker in workers if worker.runnable(edges)]:
        random.choice(ready).step(edges)
    assert all(worker.done == len(worker.program) for worker in workers), "the programs hang"
    assert not any(edges.values()), "messages are left over"
