"""A broadcast without a named root: the ranks find the one that brought a tensor.

Each rank makes a record: a flag for every rank, its own set if it brought a tensor, then what that
tensor looks like, in numbers. The sum of all records says who brought one, and describes it if it
is the only one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allfold._calls.call import Seat
from allfold._calls.descriptions import ABOUT_SIZE, describe, described
from allfold_core.errors import BroadcastMultipleTensors, BroadcastNoTensor, InvalidArgument
from allfold_core.verdict import counted

Record = np.ndarray[Any, np.dtype[np.int64]]


def record_of(seat: Seat, tensor: Any) -> tuple[Record, InvalidArgument | None]:
    """This rank's record, and what is wrong with its tensor.

    The others wait for the record even of a tensor that cannot be moved, and must hear of it.
    """
    flags = np.zeros(seat.world_size, np.int64)
    about = np.zeros(ABOUT_SIZE, np.int64)
    unfit: InvalidArgument | None = None
    if tensor is not None:
        flags[seat.rank] = 1
        try:
            about = describe(tensor)
        except InvalidArgument as error:
            unfit = error
    return np.concatenate([flags, about]), unfit


def source_in(seat: Seat, total: Record) -> int:
    """The one rank that brought a tensor, from the sum of all records."""
    sources = np.flatnonzero(total[: seat.world_size]).tolist()
    if not sources:
        raise BroadcastNoTensor(
            f"broadcast in group '{seat.group}': none of {counted(seat.world_size, 'rank')} "
            "brought a tensor; exactly one must, or all must name the root"
        )
    if len(sources) > 1:
        raise BroadcastMultipleTensors(
            f"broadcast in group '{seat.group}': ranks {sources} brought a tensor; "
            "exactly one must, or all must name the root",
            ranks=sources,
        )
    return int(sources[0])


def new_target(seat: Seat, total: Record, source: int) -> Any:
    """A tensor like that of the source, for a rank that brought none."""
    tensor = described(total[seat.world_size :])
    if tensor is None:
        raise InvalidArgument(
            f"broadcast in group '{seat.group}': rank {source} brought something that "
            "cannot be moved; its own error says why"
        )
    return tensor
