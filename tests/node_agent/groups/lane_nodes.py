"""The pages of all nodes of a group in one process, and what their ranks leave and find there."""

from __future__ import annotations

import mmap
from time import monotonic

import numpy as np
import torch

from allfold._lane.recipe import PageSeat, Recipe
from allfold_agent.compilation.op_spec import OpSpecs
from allfold_agent.groups.lane.page import AgentPage
from allfold_agent.groups.lane.program import LaneProgram
from allfold_core.operations import Fingerprint
from allfold_core.plan import Plan
from allfold_core.short_lane.page import WORD, PageLayout, PostHeader, digest_of, write_header
from tests.support.fakes.local_groups import make_plan

Placement = tuple[tuple[int, ...], ...]


def _mapped(page: AgentPage) -> memoryview:
    return memoryview(mmap.mmap(page.descriptor, page.layout.size))


class NodesOfALane:
    """One page for each node.

    Args:
        placement: the ranks of each node.

    Attributes:
        pages: by node.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.plan: Plan = make_plan(placement)
        self.pages = [AgentPage(PageLayout(len(ranks))) for ranks in placement]
        self._memory = list(map(_mapped, self.pages))

    def use(self, node: int, page: AgentPage) -> None:
        """Let the ranks of a node have another page."""
        self.pages[node] = page
        self._memory[node] = _mapped(page)

    def programs(self, fingerprint: Fingerprint) -> list[LaneProgram]:
        """Return the program of each node for such an op."""
        packed = fingerprint.pack()
        return [
            LaneProgram(OpSpecs(self.plan, node).of(packed), self.plan, page, node)
            for node, page in enumerate(self.pages)
        ]

    def put(self, rank: int, slot: int, data: bytes) -> None:
        """Leave the input of a rank where it belongs."""
        node = self.plan.index_of_rank(rank)
        page, row = self.pages[node], self.placement[node].index(rank)
        start = page.layout.input_offset(row, slot)
        page.bytes[start : start + len(data)] = torch.from_numpy(
            np.frombuffer(data, np.uint8).copy()
        )

    def post(
        self,
        rank: int,
        seq: int,
        fingerprint: Fingerprint,
        data: bytes = b"",
    ) -> None:
        """Have a rank call an op, as the SDK does it."""
        node = self.plan.index_of_rank(rank)
        layout, row = self.pages[node].layout, self.placement[node].index(rank)
        memory = self._memory[node]
        packed, slot = fingerprint.pack(), seq % layout.slots
        self.put(rank, slot, data)
        start, word = layout.fingerprint_offset(row, slot), layout.post_word(row, slot)
        memory[start : start + len(packed)] = packed
        digest = digest_of(packed)
        header = PostHeader(digest, monotonic(), 20.0, 0, len(packed), seq)
        write_header(memory, word, header)
        memory[: layout.words * WORD].cast("Q")[word] = seq + 1

    def is_published(self, node: int, seq: int) -> bool:
        """Return True if the agent of a node has told its ranks of the result of an op."""
        layout = self.pages[node].layout
        word = layout.post_word(layout.agent, seq % layout.slots)
        return bool(self._memory[node][: layout.words * WORD].cast("Q")[word] == seq + 1)

    def found(self, rank: int, slot: int, fingerprint: Fingerprint, nbytes: int) -> bytes:
        """Return the output that a rank takes, at a length that it knows."""
        node = self.plan.index_of_rank(rank)
        page = self.pages[node]
        recipe = Recipe(
            fingerprint.pack(), PageSeat(self.placement, node, self.placement[node].index(rank))
        )
        room = page.layout.slot_bytes
        rows = [
            page.bytes[start : start + room].numpy().view(recipe.stored)
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


def exchange(programs: list[LaneProgram], slot: int) -> None:
    """Have each node send what it has to all others, and write its result."""
    payloads = [bytearray(program.payload(slot)) for program in programs]
    for me, program in enumerate(programs):
        others = {node: each for node, each in enumerate(payloads) if node != me}
        assert all(program.fits(node, payload) for node, payload in others.items())
        program.finish(slot, others)
