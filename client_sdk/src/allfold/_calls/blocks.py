"""Collectives in which one side is a whole of which every rank has a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from allfold import _tensors
from allfold._calls.call import CallerSeat, checked_counts
from allfold._tensors import TensorView
from allfold_core.errors import InvalidArgument
from allfold_core.verdict import counted


@dataclass(frozen=True, slots=True)
class Blocks:
    """The cut of the whole into one block per rank, as a fingerprint has it.

    Attributes:
        seat: who has one of them.
        shape: of every block, in the caller's elements; of one row, where the blocks differ in how
            many they have.
        counts: the rows of each rank's block, where they differ.
    """

    seat: CallerSeat
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, seat: CallerSeat, block: TensorView, whole: Any, counts: Sequence[int] | None
    ) -> Blocks:
        """Return the blocks that this block, the whole and the argument ``counts`` describe.

        Args:
            whole: a tensor or a list of them; ``None`` where this rank has none, or not yet.
        """
        if counts is not None:
            return cls._counted(seat, block, checked_counts(seat, counts, "counts"))
        if isinstance(whole, list | tuple):
            return cls._listed(seat, block, whole)
        return cls(seat, block.given_shape)

    @classmethod
    def _counted(cls, seat: CallerSeat, block: TensorView, counts: tuple[int, ...]) -> Blocks:
        if block.rows != counts[seat.rank]:
            raise InvalidArgument(
                f"the block of rank {seat.rank} has {counted(block.rows, 'row')}, but counts "
                f"says {counts[seat.rank]}"
            )
        uneven = len(set(counts)) > 1
        return cls(seat, block.row_shape, counts) if uneven else cls(seat, block.given_shape)

    @classmethod
    def _listed(cls, seat: CallerSeat, block: TensorView, whole: Sequence[Any]) -> Blocks:
        """Return the blocks of a list of tensors.

        They may differ in size without ``counts``: a row is one element then."""
        _check_list(seat, whole)
        views = [_tensors.view(each, written=False, folded=False) for each in whole]
        numels = tuple(view.given_numel for view in views)
        if len(set(numels)) == 1:
            return cls(seat, block.given_shape)
        _check_listed(seat.rank, block.given_numel, numels[seat.rank])
        return cls(seat, (), numels)

    @property
    def numels(self) -> list[int]:
        """The caller's elements in each rank's block."""
        return [prod(self.shape) * count for count in self.counts or (1,) * self.seat.world_size]

    def views(self, whole: Any, *, written: bool, folded: bool) -> tuple[TensorView, ...]:
        """Look at the whole; ``InvalidArgument`` unless it consists of these blocks."""
        if isinstance(whole, list | tuple):
            return self._list_views(whole, written, folded)
        view = _tensors.view(whole, written=written, folded=folded)
        if view.given_numel != sum(self.numels):
            raise InvalidArgument(
                f"the blocks of {counted(self.seat.world_size, 'rank')} have "
                f"{counted(sum(self.numels), 'element')} together, but the tensor of "
                f"all of them has {view.given_numel}"
            )
        return (view,)

    def _list_views(
        self, whole: Sequence[Any], written: bool, folded: bool
    ) -> tuple[TensorView, ...]:
        _check_list(self.seat, whole)
        views = tuple(_tensors.view(each, written=written, folded=folded) for each in whole)
        for rank, (view, numel) in enumerate(zip(views, self.numels, strict=True)):
            _check_listed(rank, numel, view.given_numel)
        return views

    def new_whole(self, block: TensorView) -> Any:
        """A tensor for all blocks, of the kind of this rank's, in which the rows add up."""
        rows = sum(self.counts) if self.counts else self.seat.world_size * block.rows
        return _tensors.like(block.tensor, (rows, *tuple(block.tensor.shape)[1:]))


def new_block(seat: CallerSeat, whole: Any, counts: Sequence[int] | None) -> Any:
    """A tensor for this rank's block of a whole."""
    if isinstance(whole, list | tuple):
        _check_list(seat, whole)
        mine = whole[seat.rank]
        return _tensors.like(mine, tuple(_tensors.view(mine, written=False).tensor.shape))
    view = _tensors.view(whole, written=False)
    if counts is None:
        rows = even_share(seat, view.rows, "say with counts= how many rows belong to each")
    else:
        rows = checked_counts(seat, counts, "counts")[seat.rank]
    return _tensors.like(whole, (rows, *tuple(view.tensor.shape)[1:]))


def even_share(seat: CallerSeat, rows: int, advice: str) -> int:
    """The rows of each rank, where nobody has said how many; ``InvalidArgument`` with advice."""
    share, rest = divmod(rows, seat.world_size)
    if rest:
        raise InvalidArgument(
            f"{counted(rows, 'row')} cannot be split evenly over {seat.world_size} ranks; {advice}"
        )
    return share


def _check_list(seat: CallerSeat, given: Sequence[Any]) -> None:
    if len(given) != seat.world_size:
        raise InvalidArgument(
            "a list of blocks has one tensor for each rank; group "
            f"'{seat.group}' has {counted(seat.world_size, 'rank')}, got {len(given)}"
        )


def _check_listed(rank: int, expected: int, numel: int) -> None:
    if numel != expected:
        raise InvalidArgument(
            f"the block of rank {rank} has {counted(expected, 'element')}, "
            f"but its tensor in the list has {numel}"
        )
