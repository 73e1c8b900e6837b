"""The pages of all nodes of a group in one process, and what their ranks leave and find there."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch

from allfold._lane.recipe import PageSeat, Recipe
from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_agent.groups.lane.op_memory import OpMemory, Outgoing
from allfold_agent.groups.lane.page import AgentPage, NextPost
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.groups.lane.under_way import OpUnderWay
from allfold_core.operations import Fingerprint
from allfold_core.plan import Plan
from allfold_core.protocol.rank_messages import Region
from allfold_core.short_lane.choice import longest_end
from allfold_core.short_lane.page import (
    SLOT_BYTES,
    WORD,
    PageLayout,
    PostHeader,
    digest_of,
    write_ends,
    write_header,
)
from tests.support.fakes.local_groups import make_plan

Placement = tuple[tuple[int, ...], ...]


def _mapped(page: AgentPage) -> memoryview:
    return memoryview(mmap.mmap(page.descriptor, page.layout.size))


def raw(data: bytes) -> torch.Tensor:
    """Return memory with these bytes."""
    memory = torch.empty(len(data), dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(data, np.uint8)
    return memory


class NodesOfALane:
    """One page for each node, and the arenas of all ranks.

    Args:
        placement: the ranks of each node.
        slot_bytes: the longest input or output that goes through the slots.
        place_bytes: the longest of any other op.
        strategy: of reductions; "" for the one of the plan's choice.

    Attributes:
        pages: by node.
        arenas: by rank and segment.
    """

    def __init__(
        self,
        placement: Placement,
        slot_bytes: int = SLOT_BYTES,
        place_bytes: int = 0,
        strategy: str = "",
    ) -> None:
        self.placement = placement
        self.plan: Plan = make_plan(placement)
        self.pages = [
            AgentPage(PageLayout(len(ranks), slot_bytes=slot_bytes, place_bytes=place_bytes))
            for ranks in placement
        ]
        self.arenas: dict[tuple[int, int], torch.Tensor] = {}
        self._strategy = strategy
        self._specs = [OpSpecs(self.plan, node) for node in range(len(placement))]
        self._memory = list(map(_mapped, self.pages))

    def use(self, node: int, page: AgentPage) -> None:
        """Let the ranks of a node have another page."""
        self.pages[node] = page
        self._memory[node] = _mapped(page)

    def spec(self, node: int, packed: bytes) -> OpSpec:
        """Return the terms of an op on a node."""
        spec = self._specs[node].of(packed)
        if self._strategy and spec.fingerprint.kind.reduces:
            spec = replace(spec, strategy=self._strategy)
        return spec

    def programs(self, fingerprint: Fingerprint) -> list[LaneProgram]:
        """Return the program of each node for such an op."""
        packed = fingerprint.pack()
        return [
            LaneProgram(self.spec(node, packed), self.plan, page.layout, node)
            for node, page in enumerate(self.pages)
        ]

    def put(self, rank: int, slot: int, data: bytes) -> None:
        """Leave the input of a rank in its slot."""
        node, row = self._seat(rank)
        page = self.pages[node]
        start = page.layout.input_offset(row, slot)
        page.view(start)[: len(data)] = data

    def _seat(self, rank: int) -> tuple[int, int]:
        node = self.plan.index_of_rank(rank)
        return node, self.placement[node].index(rank)

    def post(
        self,
        rank: int,
        seq: int,
        fingerprint: Fingerprint,
        data: bytes = b"",
        source: Region | None = None,
    ) -> None:
        """Have a rank call an op, as the SDK does it.

        Args:
            source: of an op that is longer than a slot, where its input is said to lie; ``None``
                to put it into a new segment, whose number is that of the op.
        """
        node, row = self._seat(rank)
        layout, memory = self.pages[node].layout, self._memory[node]
        packed, slot = fingerprint.pack(), seq % layout.slots
        start, word = layout.fingerprint_offset(row, slot), layout.post_word(row, slot)
        memory[start : start + len(packed)] = packed
        digest = digest_of(packed)
        header = PostHeader(digest, monotonic(), 20.0, 0, len(packed), seq)
        write_header(memory, word, header)
        if longest_end(fingerprint, self.plan.world_size) <= layout.slot_bytes:
            self.put(rank, slot, data)
        else:
            if source is None:
                source = Region(seq, 0)
                self.arenas[rank, seq] = raw(data)
            write_ends(memory, word, source, source)
        memory[: layout.words * WORD].cast("Q")[word] = seq + 1

    def word(self, node: int, word: int) -> int:
        """Return a word of the page of a node."""
        return int(self._words(node)[word])

    def _words(self, node: int) -> memoryview:
        return self._memory[node][: self.pages[node].layout.words * WORD].cast("Q")

    def finish(self, rank: int, end: int) -> None:
        """Have a rank say that it needs no result of an op below this number."""
        node, row = self._seat(rank)
        self._words(node)[self.pages[node].layout.finished_word(row)] = end

    def is_published(self, node: int, seq: int) -> bool:
        """Return True if the agent of a node has told its ranks of the result of an op."""
        layout = self.pages[node].layout
        return self.word(node, layout.post_word(layout.agent, seq % layout.slots)) == seq + 1

    def place_of(self, node: int, seq: int) -> int:
        """Return the place in which the result of an op is."""
        layout = self.pages[node].layout
        return self.word(node, layout.post_word(layout.agent, seq % layout.slots) + 2)

    def recipe(self, rank: int, fingerprint: Fingerprint) -> Recipe:
        """Return what a rank of such an op has to do."""
        node, row = self._seat(rank)
        slot_bytes = self.pages[node].layout.slot_bytes
        return Recipe(fingerprint.pack(), PageSeat(self.placement, node, row), slot_bytes)

    def found(self, rank: int, slot: int, fingerprint: Fingerprint, nbytes: int) -> bytes:
        """Return the output that a rank takes from a slot, at a length that it knows."""
        page, recipe = self.pages[self.plan.index_of_rank(rank)], self.recipe(rank, fingerprint)
        room = page.layout.slot_bytes
        rows = [
            np.frombuffer(page.view(start)[:room], recipe.stored)
            for start in (
                page.layout.input_offset(row, slot) for row in range(page.layout.agent + 1)
            )
        ]
        out = np.zeros(nbytes, np.uint8)
        elements = out.view(recipe.stored)
        for move in recipe.moves:
            numel = move.stop - move.start
            sources = [rows[row][start : start + numel] for row, start in move.sources]
            recipe.fold(sources, elements[move.start : move.stop])
        return out.tobytes()

    def found_in_place(self, rank: int, seq: int, fingerprint: Fingerprint) -> bytes:
        """Return the output that a rank takes from the place of an op."""
        node = self.plan.index_of_rank(rank)
        place = np.frombuffer(self.pages[node].place(self.place_of(node, seq)), np.uint8)
        return self.recipe(rank, fingerprint).output_of(place).tobytes()


class Frame(NamedTuple):
    """A chunk on its way, as it was when it was sent."""

    source: int
    to: int
    start: int
    payload: bytearray


def exchange(
    programs: Sequence[LaneProgram], memories: Sequence[OpMemory], order: Random | None = None
) -> list[Frame]:
    """Have each node send what it has to all others, until all have the result.

    Args:
        order: in which frames of different nodes come; ``None`` for that of sending.

    Returns:
        All frames.
    """
    post = NextPost(0, 0, b"", is_mixed=False)
    ops = [
        OpUnderWay(post, program, memory, -1, (), lambda _: None)
        for program, memory in zip(programs, memories, strict=True)
    ]
    sent: list[Frame] = []
    on_the_way: deque[Frame] = deque()

    def send(source: int, frames: Iterable[Outgoing]) -> None:
        for each in frames:
            frame = Frame(source, each.node, each.start, bytearray(each.payload))
            sent.append(frame)
            on_the_way.append(frame)

    for node, op in enumerate(ops):
        send(node, op.begin())
    while on_the_way:
        if order is not None:
            on_the_way.rotate(order.randrange(len(on_the_way)))
        frame = on_the_way.popleft()
        op = ops[frame.to]
        send(frame.to, op.take(frame.source, frame.start, frame.payload, is_there=False))
    assert all(op.is_whole for op in ops)
    return sent
