"""The cost of a schedule: seconds on modelled links.

:func:`price` runs the programs of a schedule on a simulated clock, so it knows nothing of
strategies; it confirms their closed forms.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from allfold_core.schedules.schedule import (
    Await,
    Fold,
    Schedule,
    Send,
    Signal,
    Slice,
    Step,
    balanced_slices,
)
from allfold_core.schedules.step_graph import StepGraph
from allfold_core.topology import LinkModel

# Chunks that may wait on an edge. With room for all of them, the leaves of a tree would send
# everything at once and hold up what comes from deeper down.
_ROOM = 4
_READY, _ARRIVING, _ARRIVED, _DONE = range(4)


def price(schedule: Schedule, links: LinkModel, itemsize: int = 4, chunks: int = 1) -> float:
    """Seconds from the common start until the last node is done.

    Every node has a full-duplex port. A message leaves when the port is free and occupies it for
    β per byte; α after it began to leave it begins to come in, and occupies the receiver's port
    likewise, so messages that meet at one receiver come in one after the other. A port that goes
    from one message to the next needs o in between, which hides behind α where there is a wait
    anyway. A node folds one thing at a time, γ per byte and operand received. The switch between
    the ports is never the bottleneck. A few chunks may wait on each edge to be taken.

    Args:
        schedule: what to run.
        links: α, o, β and γ, the same between any two nodes.
        itemsize: bytes per element.
        chunks: into how many pieces every slice is cut, for receiving, folding and sending to
            overlap; 1 gives the unpipelined textbook times.
    """
    return _Simulation(schedule, links, itemsize, chunks).run()


def chunked(schedule: Schedule, chunks: int) -> Schedule:
    """The same schedule with every slice cut into ``chunks`` pieces, or fewer where it is short."""
    programs = tuple(
        tuple(piece for step in program for piece in _pieces(step, chunks))
        for program in schedule.programs
    )
    return replace(schedule, programs=programs)


def _pieces(step: Step, chunks: int) -> list[Step]:
    if isinstance(step, Signal | Await) or chunks == 1:
        return [step]
    start = step.slice.start
    parts = [
        Slice(start + part.start, start + part.stop)
        for part in balanced_slices(len(step.slice), min(chunks, len(step.slice)))
    ]
    return [replace(step, slice=part) for part in parts]


class _Simulation:
    """One run on a simulated clock, event by event; equal times go in the order of causes."""

    def __init__(self, schedule: Schedule, links: LinkModel, itemsize: int, chunks: int) -> None:
        self.graph = StepGraph(chunked(schedule, chunks), capacity=_ROOM)
        self.links = links
        self.itemsize = itemsize
        self.waits = list(self.graph.waits)
        # True for a step that is a message of its own, and not a further piece of one.
        self.begins = [
            index == 0
            for program in schedule.programs
            for step in program
            for index in range(len(_pieces(step, chunks)))
        ]
        self.out_free = [-inf] * schedule.nodes
        self.in_free = [-inf] * schedule.nodes
        self.fold_free = [0.0] * schedule.nodes
        self.events: list[tuple[float, int, int, int]] = []
        self.count = 0

    def run(self) -> float:
        """Process all events; the time of the last one."""
        for number, waits in enumerate(self.waits):
            if not waits:
                self._at(0.0, _READY, number)
        now = 0.0
        while self.events:
            now, _, event, number = heappop(self.events)
            if event == _READY:
                self._start(now, number)
            elif event == _ARRIVING:
                free = self._occupy(self.in_free, self._taker_node(number), now, number)
                self._at(free, _ARRIVED, number)
            elif event == _ARRIVED:
                self._release(now, self.graph.takers[number])
            else:
                for later in self.graph.unblocks[number]:
                    self._release(now, later)
        return now

    def _start(self, now: float, number: int) -> None:
        step, node = self.graph.steps[number], self.graph.owners[number]
        if isinstance(step, Send | Signal):
            free = self._occupy(self.out_free, node, now, number)
            begun = free - self._bytes(number) * self.links.seconds_per_byte
            self._at(begun + self.links.latency, _ARRIVING, number)
            self._at(free, _DONE, number)
        elif isinstance(step, Fold):
            work = (len(step.operands) - 1) * self._bytes(number)
            begun = max(now, self.fold_free[node])
            self.fold_free[node] = begun + work * self.links.fold_seconds_per_byte
            self._at(self.fold_free[node], _DONE, number)
        else:
            self._at(now, _DONE, number)

    def _occupy(self, ports: list[float], node: int, now: float, number: int) -> float:
        """Move the message through a port as soon as it is free; when it is free again."""
        gap = self.links.overhead if self.begins[number] else 0.0
        begun = max(now, ports[node] + gap)
        ports[node] = begun + self._bytes(number) * self.links.seconds_per_byte
        return ports[node]

    def _release(self, now: float, number: int) -> None:
        self.waits[number] -= 1
        if not self.waits[number]:
            self._at(now, _READY, number)

    def _at(self, time: float, event: int, number: int) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, event, number))

    def _taker_node(self, number: int) -> int:
        return self.graph.owners[self.graph.takers[number]]

    def _bytes(self, number: int) -> int:
        step = self.graph.steps[number]
        return 0 if isinstance(step, Signal | Await) else len(step.slice) * self.itemsize
