"""Lookup of seats by session and by node, without a scan of all seats of a group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from allfold_orchestrator.membership.group_state import Life, RankSeat
from allfold_orchestrator.membership.rank_map import RankMap


class SeatFinder:
    """An index of seats, kept up to date from the changes since the last lookup."""

    def __init__(self) -> None:
        self._seats: RankMap[RankSeat] = RankMap()
        self._rank_of: dict[str, int] = {}
        self._seats_of: Counter[Life] = Counter()

    def rank_of(self, seats: RankMap[RankSeat], session: str) -> int | None:
        """Return a rank that ``session`` holds among ``seats``, or ``None``."""
        self._catch_up(seats)
        rank = self._rank_of.get(session)
        if rank is not None and rank in seats and seats[rank].session == session:
            return rank
        # Either it has none, or it had two of which one is gone.
        return next((r for r, seat in seats.items() if seat.session == session), None)

    def has(self, seats: RankMap[RankSeat], life: Life) -> bool:
        """Return True if this incarnation of a node holds a seat."""
        self._catch_up(seats)
        return life in self._seats_of

    def _catch_up(self, seats: RankMap[RankSeat]) -> None:
        changed = list(seats.changed_since(self._seats))
        for rank in changed:
            if rank in self._seats:
                self._forget(self._seats[rank])
        for rank in changed:
            if rank in seats:
                self._rank_of[seats[rank].session] = rank
                self._seats_of[seats[rank].life] += 1
        self._seats = seats

    def _forget(self, seat: RankSeat) -> None:
        self._rank_of.pop(seat.session, None)
        self._seats_of[seat.life] -= 1
        if not self._seats_of[seat.life]:
            del self._seats_of[seat.life]


@dataclass(frozen=True, slots=True)
class Finders:
    """One index for the current epoch and one for the next: sharing one would rebuild it."""

    current: SeatFinder = field(default_factory=SeatFinder)
    forming: SeatFinder = field(default_factory=SeatFinder)
