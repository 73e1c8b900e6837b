"""The parts of all ranks' inputs that make up one rank's output, for one fingerprint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from allfold._arena import Bytes
from allfold._elements import stored_as
from allfold._lane.folding import Elements, Fold, copy, fold_of
from allfold._lane.lane_page import RankPage
from allfold_core.operations import Fingerprint, Kind
from allfold_core.schedules.parts import (
    NodeParts,
    Part,
    Placement,
    block_numels,
    even_exchange,
    layout,
    received,
)
from allfold_core.short_lane.choice import LaneRules, longest_end
from allfold_core.short_lane.page import digest_of


@dataclass(frozen=True, slots=True)
class PageSeat:
    """The seat of a rank at a page.

    Attributes:
        placement: the ranks of each node.
        node: the index of this one.
        index: of this rank among those of the node.
    """

    placement: Placement
    node: int
    index: int

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.placement[self.node]

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.local_ranks[self.index]

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return sum(map(len, self.placement))

    @property
    def crosses_nodes(self) -> bool:
        """True if there are other nodes, so that the agent has a part in each op."""
        return len(self.placement) > 1


@dataclass(frozen=True, slots=True)
class Move:
    """A range of a rank's output, and the inputs that it is the fold of.

    Attributes:
        start, stop: in the output, in elements.
        sources: the rows of the page that have it, and where their parts begin, in elements.
    """

    start: int
    stop: int
    sources: tuple[tuple[int, int], ...]


class Recipe:
    """The output of one rank, made from the inputs of all.

    Args:
        packed: the fingerprint of the call.
        seat: of this process.
        slot_bytes: the longest input or output that fits a slot.

    Attributes:
        is_in_slots: the tensors go through the slots; else the inputs lie in the arena, and the
            results in places of the page.
        digest: of the fingerprint; what ranks compare.
        stored: the type in which NumPy has the elements.
        moves: the parts of the output, in order.
        numel: the elements of the output.
        fold: makes an element of the output of those that it comes from.
    """

    def __init__(self, packed: bytes, seat: PageSeat, slot_bytes: int) -> None:
        fingerprint = Fingerprint.unpack(packed)
        self.packed = packed
        self.is_in_slots = longest_end(fingerprint, seat.world_size) <= slot_bytes
        self.digest = digest_of(packed)
        self.stored = stored_as(fingerprint.dtype)
        moves = sorted(_moves(fingerprint, seat), key=lambda move: move.start)
        self.moves = tuple(_joined(moves))
        self.numel = max((move.stop for move in self.moves), default=0)
        self.fold: Fold = copy if seat.crosses_nodes else fold_of(fingerprint, seat.world_size)

    def output_of(self, result: Bytes) -> Bytes:
        """Return the output of this rank, of the result of its node; a copy if it has gaps."""
        row = result.view(self.stored)
        parts = [
            row[start : start + move.stop - move.start]
            for move in self.moves
            for _, start in move.sources
        ]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else row[:0]
        return whole.view(np.uint8)


def _moves(fingerprint: Fingerprint, seat: PageSeat) -> Iterator[Move]:
    parts = _layout(fingerprint, seat)
    row = received(parts, len(seat.placement), seat.node)
    for part in parts.parts:
        for target in part.targets:
            if target.rank == seat.rank:
                numel = part.slice.stop - part.slice.start
                sources = _sources(part, row, seat)
                yield Move(target.offset, target.offset + numel, sources)


def _joined(moves: Iterable[Move]) -> Iterator[Move]:
    """Make one of moves that are next to each other on all sides."""
    last: Move | None = None
    for move in moves:
        if last is not None and _is_next(last, move):
            last = Move(last.start, move.stop, last.sources)
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last


def _is_next(last: Move, move: Move) -> bool:
    numel = last.stop - last.start
    behind = tuple((row, start + numel) for row, start in last.sources)
    return move.start == last.stop and move.sources == behind


def _sources(part: Part, row: NodeParts, seat: PageSeat) -> tuple[tuple[int, int], ...]:
    if seat.crosses_nodes:  # the agent has the result of the node
        return ((len(seat.local_ranks), row.place(part.slice.start)),)
    return tuple((seat.local_ranks.index(end.rank), end.offset) for end in part.sources)


def _layout(fingerprint: Fingerprint, seat: PageSeat) -> NodeParts:
    """The parts of an op on this node."""
    kind, world_size = fingerprint.kind, seat.world_size
    if kind is Kind.ALL_TO_ALL:
        return even_exchange(fingerprint, seat.placement, seat.node)
    sizes: tuple[int, ...] = (fingerprint.numel,)
    if kind.has_blocks:
        sizes = block_numels(fingerprint, world_size)
    return layout(kind, sizes, fingerprint.root, seat.placement, seat.node)


Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A range of an output, and the inputs that it is the fold of.

    Attributes:
        output: which one.
        range: of its elements; ``None`` for all of it.
        sources: in the slots of the ranks; of the shape of the output where it is all of it.
    """

    output: int
    range: slice | None
    sources: tuple[Elements, ...]


class SlotPlan:
    """The memory of a slot as the calls see it.

    Args:
        inputs, outputs: the shapes of the tensors.

    Attributes:
        inputs: where this rank leaves its inputs, in their shapes.
        output: where its outputs lie if they are taken from the slot, one after the other.
    """

    __slots__ = ("_fold", "_pieces", "inputs", "output")

    def __init__(
        self,
        page: RankPage,
        slot: int,
        recipe: Recipe,
        inputs: Sequence[Shape],
        outputs: Sequence[Shape],
    ) -> None:
        mine = page.inputs(page.index, slot).view(recipe.stored)
        self.inputs = [
            mine[start:stop].reshape(shape)
            for shape, (start, stop) in zip(inputs, _ends(inputs), strict=True)
        ]
        self.output = page.outputs(slot).view(recipe.stored)[: recipe.numel]
        self._fold = recipe.fold
        rows = [page.inputs(row, slot).view(recipe.stored) for row in range(page.layout.agent + 1)]
        self._pieces = tuple(_pieces(rows, recipe.moves, outputs))

    def fold_into(self, outputs: Sequence[Elements]) -> None:
        """Write this rank's outputs."""
        fold = self._fold
        for output, part, sources in self._pieces:
            out = outputs[output]
            fold(sources, out if part is None else out.reshape(-1)[part])


def _pieces(
    rows: Sequence[Elements], moves: Sequence[Move], outputs: Sequence[Shape]
) -> Iterator[Piece]:
    for output, (shape, (start, stop)) in enumerate(zip(outputs, _ends(outputs), strict=True)):
        for move in moves:
            low, high = max(move.start, start), min(move.stop, stop)
            if low >= high:
                continue
            begins = [(row, begin + low - move.start) for row, begin in move.sources]
            sources = [rows[row][begin : begin + high - low] for row, begin in begins]
            if (low, high) == (start, stop) and shape:  # a scalar is folded as a row of one
                yield Piece(output, None, tuple(each.reshape(shape) for each in sources))
            else:
                yield Piece(output, slice(low - start, high - start), tuple(sources))


def _ends(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    """Return where each tensor starts and stops, if they lie one after the other."""
    return list(pairwise(accumulate(map(prod, shapes), initial=0)))


_REMEMBERED = 512


class Recipes:
    """The ways to do calls in a lane, by fingerprint, and the plans of their slots."""

    def __init__(self, page: RankPage, seat: PageSeat, rules: LaneRules) -> None:
        self._page = page
        self._seat = seat
        self._rules = rules
        self._recipes: dict[bytes, Recipe | None] = {}
        self._plans: dict[tuple[Recipe, int], SlotPlan] = {}

    def of(self, packed: bytes) -> Recipe | None:
        """Return how calls with this fingerprint are done here; ``None`` if they are not."""
        try:
            return self._recipes[packed]
        except KeyError:
            return self._learn(packed)

    def _learn(self, packed: bytes) -> Recipe | None:
        if len(self._recipes) >= _REMEMBERED:
            self._recipes.clear()
            self._plans.clear()
        seat = self._seat
        recipe = None
        if self._rules.serve(packed, seat.world_size):
            recipe = Recipe(packed, seat, self._page.layout.slot_bytes)
        self._recipes[packed] = recipe
        return recipe

    def write_output(self, recipe: Recipe, slot: int) -> None:
        """Write this rank's output to its slot, from the inputs of all."""
        plan = self._plans.get((recipe, slot))
        if plan is None:
            plan = SlotPlan(self._page, slot, recipe, (), [(recipe.numel,)])
            self._plans[recipe, slot] = plan
        plan.fold_into([plan.output])
