"""Calls of ranks, ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from allfold._tensors import TensorView
from allfold_core.operations import Fingerprint
from allfold_core.wire.local_wire import Message

AUTO = "auto"
NO_ROOT = -1


@dataclass(frozen=True, slots=True)
class Seat:
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
class EpochView(Seat):
    """A group as one rank sees it during an epoch. Rank and size are read here and nowhere else.

    Attributes:
        epoch: how many epochs the group had before the one that these numbers belong to.
        nodes: how many machines the ranks are on.
        edge: the edge to which ranks come in this epoch, as too few of them are left; 0 for none.
    """

    epoch: int
    nodes: int
    edge: int = 0


# Calls are made for every op, and what is frozen takes three times as long to make.


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """The tensors of a call.

    Attributes:
        inputs: what this rank brings, one after the other.
        outputs: where its result goes, one after the other.
        in_place: the outputs are the inputs, and share their memory.
        result: what the caller gets in the end.
    """

    inputs: tuple[TensorView, ...] = ()
    outputs: tuple[TensorView, ...] = ()
    in_place: bool = False
    result: Any = None


@dataclass(slots=True, eq=False)
class CollectiveCall(Call):
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
class P2PCall(Call):
    """One end of a message: a tensor, which is the input or the output, and the envelope.

    Attributes:
        kind: ``SEND`` or ``RECV``.
        peer: the rank at the other end; of a receive, -1 for any.
        tag: the same at both ends.
    """

    kind: Message
    peer: int
    tag: int
