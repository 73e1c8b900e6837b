"""The seats of a group by number: the nodes of all, and those whose ranks are gone."""

from __future__ import annotations

from collections.abc import Iterable

from allfold_agent.p2p import messages
from allfold_agent.p2p.messages import PendingCall
from allfold_core.errors import AllfoldError
from allfold_core.mailbox import ANY_SOURCE
from allfold_core.survival.records import Seat


class NodesOfSeats:
    """The node of each seat that the group has had, also of ranks that are gone.

    Its owner's lock protects it.
    """

    def __init__(self, seats: Iterable[Seat]) -> None:
        self._nodes: dict[int, str] = {}
        self.add(seats)

    def add(self, seats: Iterable[Seat]) -> None:
        """Note the seats of an epoch."""
        self._nodes.update((seat.number, seat.node) for seat in seats)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of all seats."""
        return frozenset(self._nodes)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of all seats."""
        return frozenset(self._nodes.values())

    def node_of(self, number: int) -> str:
        """Return the node of a seat."""
        return self._nodes[number]


class GoneSeats:
    """Those that have left in order, and those that are lost. Its owner's lock protects it.

    Args:
        group: its name.
        seats: all that there have been.
    """

    def __init__(self, group: str, seats: NodesOfSeats) -> None:
        self._group = group
        self._seats = seats
        self._left: dict[int, str] = {}
        self._lost: dict[int, AllfoldError] = {}

    def leave(self, seat: int, how: str) -> None:
        """A rank has left in order; ``how`` is a phrase to follow its name."""
        self._left[seat] = how

    def lose(self, seat: int, error: AllfoldError) -> None:
        """A rank is lost; ``error`` is what others hear of it."""
        self._lost[seat] = error

    def is_lost(self, seat: int) -> bool:
        """Return True for a rank that is lost."""
        return seat in self._lost

    def error_of(self, call: PendingCall) -> AllfoldError | None:
        """Return the error of a call whose every possible peer is gone; ``None`` for others."""
        peer = call.message.peer
        others = self._seats.numbers - {call.rank} if peer == ANY_SOURCE else {peer}
        if not others <= self._left.keys() | self._lost.keys():
            return None
        losses = [error for seat, error in self._lost.items() if seat in others]
        if losses:
            return losses[-1]
        return messages.peer_left(self._group, call, others, self._left)
