"""The dependencies in a schedule: the model of execution that proofs and prices share.

The model is data flow, as the executor does it. A step starts when

* every earlier step of its program that writes part of its slice is done, and if it writes itself,
  every earlier ``Send`` of a part of its slice has put its message on the edge;
* the earlier steps on the same edge and direction are done, and the edge has room: it holds at
  most ``capacity`` messages, and a message stays on it until its ``Receive`` or ``Fold`` takes it;
* what it takes has come;
* every earlier ``Await`` is done; and for a ``Signal``, all earlier steps are, with what they
  sent taken by its receiver.

Each rule says "this step after that one" and none depends on timing, so the rules are the edges of
a fixed graph: one run that comes to its end proves that every run does, with the same values.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from allfold_core.schedules.schedule import (
    Await,
    Fold,
    Program,
    Receive,
    Schedule,
    Send,
    Signal,
    Step,
)

# Tuples, because unions make isinstance twice as slow, and this runs for every step.
_SIGNALS = (Signal, Await)
_SENDING = (Send, Signal)
_TAKING = (Receive, Await)
_NO_SPAN = (0, 0)


class ScheduleError(AssertionError):
    """A schedule is wrong: a bug in a strategy, never in what a user did."""


class StepGraph:
    """The steps of a schedule, numbered over all programs, and their order.

    The tensor is cut into *segments* at the bounds of all slices, so costs do not depend on its
    size. A *cell* is the content of one segment of one node after one write; the first
    ``schedule.nodes`` cells are the nodes' contributions.

    Attributes:
        steps: all steps, one program after the other.
        owners: for each step, its node.
        spans: for each step, its first segment and the one after its last; (0, 0) for signals.
        reads: for each step, the cells that its slice holds before it.
        writes: for each step, the cells that it makes.
        fences: for each step, the ``Await`` before it, or -1.
        takers: for each ``Send`` and ``Signal``, the step that takes it.
        senders: for each step that takes, the sending step by node.
        reports: for each ``Signal``, the earlier steps of its program back to the one before.
        waits: for each step, after how many others it comes, messages included.
        unblocks: for each step, those that come after it, without the taker of its message.
        final_cells: for each node, the cells it ends with.
        cell_count: how many cells there are.

    Raises:
        ScheduleError: for steps that make no sense, and messages that do not match.
    """

    def __init__(self, schedule: Schedule, capacity: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"an edge has room for at least one message, not {capacity}")
        self.schedule = schedule
        self.capacity = capacity
        self.steps: list[Step] = [step for program in schedule.programs for step in program]
        self.owners = [node for node, program in enumerate(schedule.programs) for _ in program]
        count = len(self.steps)
        self.spans = [_NO_SPAN] * count
        self.reads: list[list[int]] = [[]] * count
        self.writes = [range(0)] * count
        self.fences = [-1] * count
        self.takers = [-1] * count
        self.senders: list[dict[int, int]] = [{} for _ in range(count)]
        self.reports: dict[int, list[int]] = {}
        self.waits = [0] * count
        self.unblocks: list[list[int]] = [[] for _ in range(count)]
        self.final_cells: list[list[int]] = []
        self.cell_count = schedule.nodes
        self._writer_of_cell = [-1] * schedule.nodes
        self._sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._taken: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._cut()
        self._read_programs()
        self._match_messages()

    def _check(self, number: int, node: int, step: Step) -> None:
        """Refuse a step that cannot be meant."""
        if isinstance(step, Fold):
            peers = step.operands
            if len(set(peers)) != len(peers) or len(peers) < 2:
                self.fail(number, "needs two or more operands, each once")
            low, high = min(peers), max(peers)
        else:
            low = high = step.to if isinstance(step, _SENDING) else step.source
            if low == node:
                self.fail(number, "is addressed to its own node")
        if low < 0 or high >= self.schedule.nodes:
            self.fail(number, f"names a node beyond the {self.schedule.nodes} there are")

    def _cut(self) -> None:
        """Find the segments, and which of them each step spans."""
        numel = self.schedule.numel
        moving: list[tuple[int, int, int]] = []
        for number, (node, step) in enumerate(zip(self.owners, self.steps, strict=True)):
            self._check(number, node, step)
            if not isinstance(step, _SIGNALS):
                start, stop = step.slice.start, step.slice.stop
                if start >= stop or stop > numel:
                    self.fail(number, f"has an empty slice or one beyond {numel} elements")
                moving.append((number, start, stop))
        bounds = {0, numel}
        for block in self.schedule.blocks:
            bounds.update((block.start, block.stop))
        bounds.update([start for _, start, _ in moving], [stop for _, _, stop in moving])
        self.bounds = sorted(bounds)
        index = {bound: position for position, bound in enumerate(self.bounds)}
        for number, start, stop in moving:
            self.spans[number] = index[start], index[stop]

    def _read_programs(self) -> None:
        start = 0
        for node, program in enumerate(self.schedule.programs):
            content = [node] * (len(self.bounds) - 1)
            unsent: list[list[int]] = [[] for _ in content]
            for number, step in enumerate(program, start):
                if not isinstance(step, _SIGNALS):
                    self._order_data(number, content)
                    if isinstance(step, Send):
                        self._read(number, unsent)
                    else:
                        self._write(number, content, unsent)
                self._list_messages(number, node, step)
            self._order_signals(start, program)
            self.final_cells.append(content)
            start += len(program)

    def _order_data(self, number: int, content: list[int]) -> None:
        """Note which cells the step finds, and put it after those that made them."""
        first, last = self.spans[number]
        before = self.reads[number] = content[first:last]
        previous = -1
        for cell in before:
            writer = self._writer_of_cell[cell]
            if writer != previous:
                self._after(number, writer)
                previous = writer

    def _read(self, number: int, unsent: list[list[int]]) -> None:
        for segment in range(*self.spans[number]):
            unsent[segment].append(number)

    def _write(self, number: int, content: list[int], unsent: list[list[int]]) -> None:
        """Make new cells, and put the step after those that send the old ones."""
        first, last = self.spans[number]
        for segment in range(first, last):
            if unsent[segment]:
                for sender in unsent[segment]:
                    self._after(number, sender)
                unsent[segment] = []
        written = range(self.cell_count, self.cell_count + last - first)
        self.cell_count = written.stop
        self.writes[number] = content[first:last] = written
        self._writer_of_cell.extend([number] * len(written))

    def _list_messages(self, number: int, node: int, step: Step) -> None:
        if isinstance(step, _SENDING):
            self._sent[node, step.to].append(number)
        elif isinstance(step, _TAKING):
            self._taken[step.source, node].append(number)
        else:
            for source in step.operands:
                if source != node:
                    self._taken[source, node].append(number)

    def _order_signals(self, start: int, program: Program) -> None:
        """Put every step after the latest ``Await``, and every ``Signal`` after all before it."""
        fence = -1
        earlier: list[int] = []
        for number, step in enumerate(program, start):
            self.fences[number] = fence
            if fence >= 0:
                self._after(number, fence)
            if type(step) is Signal:
                self.reports[number] = earlier
                for before in earlier:
                    self._after(number, before)
                earlier = []
            elif type(step) is Await:
                fence = number
            earlier.append(number)

    def _match_messages(self) -> None:
        for edge in self._sent.keys() | self._taken.keys():
            sent, taken = self._sent[edge], self._taken[edge]
            for sender, taker in zip(sent, taken, strict=False):
                if self.spans[sender] != self.spans[taker]:
                    self.fail(taker, f"takes another message than {self.where(sender)} sent")
                self.takers[sender] = taker
                self.senders[taker][edge[0]] = sender
                self.waits[taker] += 1
            if len(sent) > len(taken):
                self.fail(sent[len(taken)], "sends what its receiver never takes")
            if len(taken) > len(sent):
                self.fail(taken[len(sent)], f"waits for what node {edge[0]} never sends")
            self._order_edge(sent, taken)
        for signal, earlier in self.reports.items():
            for before in earlier:
                if type(self.steps[before]) is Send:
                    self._after(signal, self.takers[before])

    def _order_edge(self, sent: list[int], taken: list[int]) -> None:
        for earlier, later in zip(taken, sent[self.capacity :], strict=False):
            self._after(later, earlier)
        if self.capacity > 1:  # With room for one, each step is after its predecessor already.
            for steps in (sent, taken):
                for earlier, later in pairwise(steps):
                    self._after(later, earlier)

    def _after(self, later: int, earlier: int) -> None:
        if earlier >= 0:
            self.waits[later] += 1
            self.unblocks[earlier].append(later)

    def where(self, number: int) -> str:
        """A step, for people."""
        node = self.owners[number]
        first = sum(len(program) for program in self.schedule.programs[:node])
        return f"node {node}, step {number - first}, {self.steps[number]}"

    def elements(self, segment: int) -> str:
        """A segment, for people."""
        return f"elements [{self.bounds[segment]}, {self.bounds[segment + 1]})"

    def fail(self, number: int, what: str) -> None:
        """Refuse the schedule because of a step."""
        raise ScheduleError(f"{self.where(number)}: {what}")
