"""The seats whose ranks neither send nor receive any more, and the calls that wait for them."""

from __future__ import annotations

from allfold_agent.p2p import refusals
from allfold_agent.p2p.messages import PendingCall
from allfold_agent.p2p.seats import Seats
from allfold_core.errors import AllfoldError
from allfold_core.mailbox import ANY_SOURCE


class GoneSeats:
    """Those that have left in order, and those that are lost. Its owner's lock protects it.

    Args:
        group: its name.
        seats: all that there have been.
    """

    def __init__(self, group: str, seats: Seats) -> None:
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
        return refusals.peer_left(self._group, call, others, self._left)
