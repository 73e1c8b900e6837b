"""The proof that a schedule is right, by running it on symbols instead of numbers.

:mod:`allfold_core.schedules.step_graph` has the model of execution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_

from allfold_core.schedules.schedule import Await, Fold, Receive, Schedule, Send, Signal, Slice
from allfold_core.schedules.step_graph import ScheduleError, StepGraph


def check_overwrites(graph: StepGraph, order: Iterable[int]) -> int:
    """Prove the rule above for a schedule; return how many overwritten messages it was proved for.

    Args:
        order: the steps in an order in which they can run.

    Raises:
        ScheduleError: naming the step that overwrites, the elements and the message.
    """
    return _Overwrites(graph).check(order)


class _Overwrites:
    """One run. The messages of each segment are numbered, so that a set of them is an integer."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.bits = _message_bits(graph)
        # The messages sent from a cell, by segment too: a node's contribution is one cell in all.
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        # By cell, the messages taken before its content could be made.
        self.taken = [0] * graph.cell_count
        for send, bit in self.bits.items():
            for place in enumerate(graph.reads[send], graph.spans[send][0]):
                self.sent[place] |= bit

    def check(self, order: Iterable[int]) -> int:
        proved = 0
        for number in order:
            step = self.graph.steps[number]
            if isinstance(step, Receive):
                proved += self._receive(number, self.graph.senders[number][step.source])
            elif isinstance(step, Fold):
                self._fold(number, step)
        return proved

    def _receive(self, number: int, sender: int) -> int:
        graph, proved = self.graph, 0
        bit = self.bits[sender]
        places = enumerate(graph.reads[number], graph.spans[number][0])
        for place, brought, new in zip(
            places, graph.reads[sender], graph.writes[number], strict=True
        ):
            pending = self.sent.get(place, 0)
            if untaken := pending & ~self.taken[brought]:
                self._refuse(number, place, untaken)
            proved += pending.bit_count()
            self.taken[new] = self.taken[brought] | bit
        return proved

    def _fold(self, number: int, step: Fold) -> None:
        graph, node = self.graph, self.graph.owners[number]
        senders = graph.senders[number]
        bits = reduce(or_, [self.bits[sender] for sender in senders.values()])
        rows = [graph.reads[number if peer == node else senders[peer]] for peer in step.operands]
        for new, cells in zip(graph.writes[number], zip(*rows, strict=True), strict=True):
            self.taken[new] = reduce(or_, [self.taken[cell] for cell in cells], bits)

    def _refuse(self, number: int, place: tuple[int, int], untaken: int) -> None:
        graph, (segment, cell) = self.graph, place
        send = next(
            each
            for each, bit in self.bits.items()
            if bit & untaken
            and segment in range(*graph.spans[each])
            and graph.reads[each][segment - graph.spans[each][0]] == cell
        )
        graph.fail(
            number,
            f"overwrites {graph.elements(segment)}, which {graph.where(send)} sent and which its "
            "receiver may not have taken yet",
        )


def _message_bits(graph: StepGraph) -> dict[int, int]:
    """For each ``Send`` a bit that no other one which shares a segment with it has."""
    used = [0] * (len(graph.bounds) - 1)
    bits: dict[int, int] = {}
    for number, step in enumerate(graph.steps):
        if isinstance(step, Send):
            first, last = graph.spans[number]
            place = max(used[first:last])
            used[first:last] = [place + 1] * (last - first)
            bits[number] = 1 << place
    return bits


__all__ = ["ScheduleError", "verify"]


def verify(schedule: Schedule, capacity: int = 1) -> None:
    """Prove that ``schedule`` does what its kind promises.

    * Where a result is due, every element is the fold of every node's contribution exactly once,
      as one expression, the same on all nodes; for kinds that only move, it is what the node has
      brought that the element comes from.
    * Every message is taken, in order, with the slice it was sent for; none is left over.
    * No node gets an element of the final value twice.
    * It never deadlocks with ``capacity`` messages of room on each edge. Room for one, the
      default, is the strictest: it implies all greater capacities, and the executor's chunks too
      (where messages can pass one by one, they can pass in pieces).
    * No node finishes before it has heard, directly or through others, from every other node.
    * What a node has sent is not overwritten by a ``Receive`` before it was taken
      (:mod:`allfold_core.schedules.verify` says why, and what of a ``Fold``).

    Raises:
        ScheduleError: naming the node, the step and the elements.
    """
    proof = _Proof(schedule, capacity)
    order = proof.run()
    proof.check_results()
    proof.check_outcome_safety()
    check_overwrites(proof.graph, order)


class _Expressions:
    """Folds as numbers: the same expression, operand order included, has the same number."""

    def __init__(self, nodes: int) -> None:
        self.contributions = [1 << node for node in range(nodes)]
        self._numbers: dict[tuple[int, ...], int] = {}

    def fold(self, values: tuple[int, ...]) -> int:
        """The number of the left fold; -1 where a contribution would be in it twice."""
        number = self._numbers.get(values)
        if number is None:
            number = values[0]
            for value in values[1:]:
                number = self._fold_two(number, value)
                if number < 0:
                    break
            self._numbers[values] = number
        return number

    def _fold_two(self, left: int, right: int) -> int:
        number = self._numbers.get((left, right))
        if number is None:
            if self.contributions[left] & self.contributions[right]:
                return -1
            number = self._numbers[left, right] = len(self.contributions)
            self.contributions.append(self.contributions[left] | self.contributions[right])
        return number


class _Proof:
    """One symbolic run.

    ``values`` and ``heard`` are per cell: its expression, and the set of nodes (as bits) without
    which it could not have been made. ``known`` is the same set per step. Sets flow only along
    data and signals, not along the order of an edge, which makes them a safe underestimate.
    """

    def __init__(self, schedule: Schedule, capacity: int) -> None:
        self.graph = StepGraph(schedule, capacity)
        self.schedule = schedule
        self.everybody = (1 << schedule.nodes) - 1
        self.expressions = _Expressions(schedule.nodes)
        self.values = list(range(self.graph.cell_count))
        self.heard = [1 << node for node in range(schedule.nodes)]
        self.heard += [0] * (self.graph.cell_count - schedule.nodes)
        self.known = [1 << node for node in self.graph.owners]
        self.blocks = list(_block_numbers(self.graph.bounds, schedule.blocks))
        self.origins = [schedule.origin(block) for block in self.blocks]

    def run(self) -> list[int]:
        """Run every step when those that it waits for are done; return them in that order."""
        waits, takers, unblocks = list(self.graph.waits), self.graph.takers, self.graph.unblocks
        ready = [number for number, count in enumerate(waits) if not count]
        for number in ready:
            self._run_step(number)
            after = unblocks[number]
            if takers[number] >= 0:
                after = [*after, takers[number]]
            for later in after:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
        if len(ready) < len(waits):
            stuck = [number for number, count in enumerate(waits) if count]
            others = "; ".join(map(self.graph.where, stuck[1:4]))
            self.graph.fail(stuck[0], f"waits forever, with {len(stuck) - 1} others: {others}")
        return ready

    def _run_step(self, number: int) -> None:
        step = self.graph.steps[number]
        fence = self.graph.fences[number]
        if fence >= 0:
            self.known[number] |= self.known[fence]
        if isinstance(step, Receive):
            self._receive(number, step)
        elif isinstance(step, Fold):
            self._fold(number, step)
        elif isinstance(step, Await):
            self.known[number] |= self.known[self.graph.senders[number][step.source]]
        elif isinstance(step, Signal):
            for before in self.graph.reports[number]:
                self.known[number] |= self.known[before]

    def _receive(self, number: int, step: Receive) -> None:
        graph, values, heard = self.graph, self.values, self.heard
        sender = graph.senders[number][step.source]
        known = total = self.known[number] | self.known[sender]
        first = graph.spans[number][0]
        for segment, (old, sent, new) in enumerate(
            zip(graph.reads[number], graph.reads[sender], graph.writes[number], strict=True), first
        ):
            if self._is_final(values[old], segment):
                graph.fail(number, f"gets {self._elements(number, new)}, which it has already")
            values[new] = values[sent]
            heard[new] = known | heard[sent]
            total |= heard[new]
        self.known[number] = total

    def _fold(self, number: int, step: Fold) -> None:
        graph, values, heard = self.graph, self.values, self.heard
        node, senders = graph.owners[number], graph.senders[number]
        sources = [number if operand == node else senders[operand] for operand in step.operands]
        known = total = reduce(or_, [self.known[source] for source in sources], self.known[number])
        rows = [graph.reads[source] for source in sources]
        for new, cells in zip(graph.writes[number], zip(*rows, strict=True), strict=True):
            value = self.expressions.fold(tuple([values[cell] for cell in cells]))
            if value < 0:
                graph.fail(number, f"folds a contribution to {self._elements(number, new)} twice")
            values[new] = value
            heard[new] = reduce(or_, [heard[cell] for cell in cells], known)
            total |= heard[new]
        self.known[number] = total

    def _is_final(self, value: int, segment: int) -> bool:
        origin = self.origins[segment]
        if origin >= 0:
            return value == origin
        return self.expressions.contributions[value] == self.everybody

    def check_results(self) -> None:
        """Every node that has a result has the whole one, and all have the same."""
        if not self.schedule.numel:
            return
        expected = [-1] * len(self.blocks)
        for node, cells in enumerate(self.graph.final_cells):
            for segment, cell in enumerate(cells):
                block = self.blocks[segment]
                if block >= 0 and self.schedule.has_result(node, block):
                    self._check_result(node, segment, self.values[cell], expected)

    def _check_result(self, node: int, segment: int, value: int, expected: list[int]) -> None:
        if not self._is_final(value, segment):
            raise ScheduleError(f"node {node} ends {self._incomplete(segment, value)}")
        if expected[segment] < 0:
            expected[segment] = value
        if value != expected[segment]:
            elements = self.graph.elements(segment)
            raise ScheduleError(f"node {node} has another order of folds in {elements}")

    def check_outcome_safety(self) -> None:
        """No node is done before it has heard from every other one."""
        heard = [1 << node for node in range(self.schedule.nodes)]
        for owner, known in zip(self.graph.owners, self.known, strict=True):
            heard[owner] |= known
        for node, known in enumerate(heard):
            if known != self.everybody:
                missing = _members(self.everybody & ~known)
                raise ScheduleError(f"node {node} can finish without having heard from {missing}")

    def _incomplete(self, segment: int, value: int) -> str:
        where = f"in {self.graph.elements(segment)}"
        origin = self.origins[segment]
        if origin >= 0:
            owner = "the root" if origin == self.schedule.root else f"node {origin}"
            return f"without {owner}'s content {where}"
        missing = _members(self.everybody & ~self.expressions.contributions[value])
        return f"without the contribution of {missing} {where}"

    def _elements(self, number: int, cell: int) -> str:
        first = self.graph.spans[number][0]
        return self.graph.elements(first + cell - self.graph.writes[number].start)


def _block_numbers(bounds: Sequence[int], blocks: Sequence[Slice]) -> Iterator[int]:
    """For each segment the block that it lies in, -1 between blocks; 0 where there are none."""
    if not blocks:
        yield from [0] * (len(bounds) - 1)
        return
    starts = {block.start: (number, block.stop) for number, block in enumerate(blocks) if block}
    number, stop = -1, 0
    for bound in bounds[:-1]:
        if bound in starts:
            number, stop = starts[bound]
        yield number if bound < stop else -1


def _members(mask: int) -> str:
    nodes = [node for node in range(mask.bit_length()) if mask >> node & 1]
    shown = ", ".join(map(str, nodes[:8]))
    return f"node {shown}" if len(nodes) == 1 else f"nodes {shown}{' ...' * (len(nodes) > 8)}"
