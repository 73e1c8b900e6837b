"""The arrays that a rank reads and writes in one slot of the page, kept for repeated calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from allfold._lane.folding import Elements
from allfold._lane.lane_page import LanePage
from allfold._lane.recipe import Move, Recipe

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
        page: LanePage,
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
