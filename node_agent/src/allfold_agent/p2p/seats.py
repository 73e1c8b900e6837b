"""The seats of a group by number; point-to-point messages address ranks by these numbers."""

from __future__ import annotations

from collections.abc import Iterable

from allfold_core.survival.records import Seat


class Seats:
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
