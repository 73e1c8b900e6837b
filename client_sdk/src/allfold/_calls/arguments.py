"""Arguments that several kinds of calls have; ``InvalidArgument`` for those that cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from allfold import _tensors
from allfold._calls.call import Seat
from allfold._tensors import TensorView
from allfold_core.dtypes import Alias, DType
from allfold_core.errors import InvalidArgument
from allfold_core.verdict import counted, numbering

LARGEST = 1 << 63


class Batch(NamedTuple):
    """One tensor, or a list that travels as one; ``shape`` is in the caller's elements."""

    views: tuple[TensorView, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> DType:
        return self.views[0].dtype

    @property
    def alias(self) -> Alias:
        return self.views[0].element.alias

    @property
    def is_complex(self) -> bool:
        return any(view.is_complex for view in self.views)


def batch(given: Any, *, written: bool, folded: bool) -> Batch:
    """Look at a tensor or a list of them, as :func:`allfold._tensors.view` does at one."""
    if not isinstance(given, list | tuple):
        view = _tensors.view(given, written=written, folded=folded)
        return Batch((view,), view.given_shape)
    if not given:
        raise InvalidArgument("an empty list of tensors")
    views = tuple(_tensors.view(each, written=written, folded=folded) for each in given)
    check_one_dtype(views)
    return Batch(views, (sum(view.given_numel for view in views),))


def check_one_dtype(views: Sequence[TensorView]) -> None:
    """Refuse tensors of several types in one op."""
    for view in views:
        if view.element is not views[0].element and view.element != views[0].element:
            labels = sorted({each.element.label for each in views})
            raise InvalidArgument(
                f"the tensors of one op have one dtype, got {', '.join(labels)}; "
                "call once per dtype"
            )


def checked_rank(seat: Seat, rank: int, what: str) -> int:
    """The rank, if it is one of the group; ``what`` is it in the words of the error."""
    found = None if isinstance(rank, bool) else whole_numbers([rank])
    if found is None or not 0 <= found[0] < seat.world_size:
        raise InvalidArgument(
            f"{what} {rank!r} is not a rank of group '{seat.group}': "
            f"its {numbering(seat.world_size)}"
        )
    return found[0]


def checked_root(seat: Seat, root: int) -> int:
    return checked_rank(seat, root, "root")


def checked_counts(seat: Seat, counts: Sequence[int], name: str) -> tuple[int, ...]:
    """The rows of each rank, from the argument of that name."""
    checked = whole_numbers(counts)
    if (
        checked is None
        or len(checked) != seat.world_size
        or any(not 0 <= count < LARGEST for count in checked)
    ):
        raise InvalidArgument(
            f"{name} has one whole number of rows, at least 0, for each rank of "
            f"group '{seat.group}', which has {counted(seat.world_size, 'rank')}; got {counts!r}"
        )
    return checked


def whole_numbers(given: Any) -> tuple[int, ...] | None:
    """The integers of a sequence, whatever library they are of; ``None`` where it has others."""
    try:
        return tuple(index(each) for each in given)
    except TypeError:
        return None
