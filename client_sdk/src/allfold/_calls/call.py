"""Calls of ranks, ready to be sent, and the arguments that several kinds of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple, Self

from allfold import _tensors
from allfold._tensors import TensorView
from allfold_core.dtypes import Alias, DType
from allfold_core.errors import AllfoldError, ArenaExhausted, GpuFailed, InvalidArgument, LocalError
from allfold_core.operations import Fingerprint
from allfold_core.protocol.rank_messages import Message
from allfold_core.verdict import counted, numbering

LARGEST = 1 << 63


class TensorBatch(NamedTuple):
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


def batch(given: Any, *, written: bool, folded: bool) -> TensorBatch:
    """Look at a tensor or a list of them, as :func:`allfold._tensors.view` does at one."""
    if not isinstance(given, list | tuple):
        view = _tensors.view(given, written=written, folded=folded)
        return TensorBatch((view,), view.given_shape)
    if not given:
        raise InvalidArgument("an empty list of tensors")
    views = tuple(_tensors.view(each, written=written, folded=folded) for each in given)
    check_one_dtype(views)
    return TensorBatch(views, (sum(view.given_numel for view in views),))


def check_one_dtype(views: Sequence[TensorView]) -> None:
    """Refuse tensors of several types in one op."""
    for view in views:
        if view.element is not views[0].element and view.element != views[0].element:
            labels = sorted({each.element.label for each in views})
            raise InvalidArgument(
                f"the tensors of one op have one dtype, got {', '.join(labels)}; "
                "call once per dtype"
            )


def checked_rank(seat: CallerSeat, rank: int, what: str) -> int:
    """The rank, if it is one of the group; ``what`` is it in the words of the error."""
    found = None if isinstance(rank, bool) else whole_numbers([rank])
    if found is None or not 0 <= found[0] < seat.world_size:
        raise InvalidArgument(
            f"{what} {rank!r} is not a rank of group '{seat.group}': "
            f"its {numbering(seat.world_size)}"
        )
    return found[0]


def checked_counts(seat: CallerSeat, counts: Sequence[int], name: str) -> tuple[int, ...]:
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


AUTO = "auto"
NO_ROOT = -1


@dataclass(frozen=True, slots=True)
class CallerSeat:
    """The calling rank and its group."""

    group: str
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class SeatRequest:
    """The seat that a process asks for.

    Attributes:
        rank: ``None`` for whichever is free.
        world_size: so many ranks open the group.
    """

    group: str
    rank: int | None
    world_size: int

    def describe(self) -> str:
        """A phrase for messages: ``rank 3``."""
        return "a rank" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class EpochView(CallerSeat):
    """A group as one rank sees it during an epoch. Rank and size are read here and nowhere else.

    Attributes:
        epoch: how many epochs the group had before the one that these numbers belong to.
        nodes: how many machines the ranks are on.
        boundary: where ranks wait in this epoch, as too few of them are left; 0 for none.
    """

    epoch: int
    nodes: int
    boundary: int = 0

    @classmethod
    def told(cls, group: str, body: Mapping[str, Any]) -> Self:
        """Return the view that a message of the agent describes."""
        names = ("rank", "world_size", "epoch", "nodes", "boundary")
        return cls(group, *(body[name] for name in names))


# Calls are made for every op, and what is frozen takes three times as long to make.


@dataclass(slots=True, kw_only=True, eq=False)
class RankCall:
    """The tensors of a call.

    Attributes:
        inputs: what this rank brings, one after the other.
        outputs: where its result goes, one after the other.
        in_place: the outputs are the inputs, and share their memory.
        result: what the caller gets in the end.
        on_host: the agent takes it from the memory of the host alone.
    """

    inputs: tuple[TensorView, ...] = ()
    outputs: tuple[TensorView, ...] = ()
    in_place: bool = False
    result: Any = None
    on_host: bool = False


@dataclass(slots=True, eq=False)
class CollectiveCall(RankCall):
    """One collective as this rank calls it.

    Attributes:
        fingerprint: what the ranks must agree on.
        is_unlike: it depends on more than its arguments.
    """

    fingerprint: Fingerprint
    is_unlike: bool = False


# One object for all calls that are alike.
fingerprint = lru_cache(maxsize=1024)(Fingerprint)


@dataclass(slots=True, eq=False)
class P2PCall(RankCall):
    """One end of a message: a tensor, which is the input or the output, and the envelope.

    Attributes:
        kind: ``SEND`` or ``RECV``.
        peer: the rank at the other end; of a receive, -1 for any.
        tag: the same at both ends.
    """

    kind: Message
    peer: int
    tag: int


_OF_LIBRARIES = (
    ArithmeticError,
    AttributeError,
    BufferError,
    LookupError,
    MemoryError,
    RuntimeError,
    ValueError,
)


def is_for_this_rank(error: BaseException) -> bool:
    """Return True for an error of one call, of which no other rank hears.

    Of exceptions that are not Allfold's, those of libraries that do not cope with an argument.
    Others are the program's: a ``TypeError`` is that of a function that was called wrongly, so not
    at all, and a time limit, or what else a signal's handler raises, may come up anywhere.
    """
    if isinstance(error, AllfoldError):
        is_local = isinstance(error, LocalError | ArenaExhausted | GpuFailed)
        return is_local and not isinstance(error, TypeError)
    return isinstance(error, _OF_LIBRARIES)
