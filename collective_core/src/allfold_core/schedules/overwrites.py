"""The proof that what was sent is not overwritten before its receiver has taken it.

An agent sends a range of its work buffer without a copy: the kernel may read the pages until the
receiver has taken the message, and after a broken connection the agent sends them once more. So a
later ``Receive`` into the range must be an effect of the message having been taken. (Before a
``Fold`` into the range the agent copies what it sends; see ``snapshot`` in its task graph.)

Only causes that hold in every execution count: the message that a ``Receive`` brings was made from
content that its sender made, at the same element, after the earlier message was taken. The room
on an edge and the order of steps in a program do not count, nor does anything about timing, and
since it holds for every element alone it holds for the agent's chunks, wherever they are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import reduce
from operator import or_

from allfold_core.schedules.schedule import Fold, Receive, Send
from allfold_core.schedules.step_graph import StepGraph


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
