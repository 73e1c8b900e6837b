"""The terms of the groups whose agents are linked to this replica, as it read them last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from allfold_core.survival.term_record import Life, TermRecord
from allfold_orchestrator.membership.terms import may_evict


class KnownTerms:
    """Records of terms by group, and who is in them."""

    def __init__(self) -> None:
        self.records: dict[str, TermRecord] = {}

    def replace(self, group: str, record: TermRecord | None) -> set[Life]:
        """Put a record in the place of the last one; return the lives that are in none any more."""
        before = self.records.pop(group, None)
        if record is not None:
            self.records[group] = record
        return before.lives - self.lives if before else set()

    def knows(self, group: str, record: TermRecord) -> bool:
        """Return True if the last record of the group differs from this one in its seats alone."""
        known = self.records.get(group)
        return known is not None and _without_seats(known) == _without_seats(record)

    @property
    def lives(self) -> set[Life]:
        """All nodes of all terms."""
        return {life for record in self.records.values() for life in record.lives}

    def groups_of(self, life: Life) -> set[str]:
        """Return the groups that a life is in."""
        return {group for group, record in self.records.items() if record.has(life)}

    def members_with(self, life: Life) -> set[Life]:
        """Return the others that are in a group with this life."""
        records = [self.records[group] for group in self.groups_of(life)]
        return {each for record in records for each in record.lives} - {life}

    def named_beside(self, life: Life, names: Collection[str]) -> set[Life]:
        """Return the others with these names that are in a group with this life.

        It takes as long as there are names, not nodes.
        """
        voters = [self.records[group].voters for group in self.groups_of(life)]
        return {
            (name, each[name].incarnation) for each in voters for name in names if name in each
        } - {life}

    def control_url(self, life: Life) -> str | None:
        """Return the address of a node's control port."""
        for group in self.groups_of(life):
            return self.records[group].voters[life[0]].control_url
        return None

    @property
    def ranks(self) -> Counter[str]:
        """The number of ranks of each node, over all groups."""
        return Counter(seat.node for record in self.records.values() for seat in record.seats)

    @property
    def leaders(self) -> set[str]:
        """The nodes that lead a group."""
        return {record.term.leader for record in self.records.values()}

    def protected(
        self, lives: Iterable[Life], now: float, generation: int, *, is_proven: bool = False
    ) -> set[Life]:
        """Return those of these lives that may not be evicted, as a record may lack their term.

        Args:
            generation: of the store.
            is_proven: they are known to be gone, and not only silent.
        """

        def is_protected(life: Life) -> bool:
            found = [self.records[group] for group in self.groups_of(life)]
            return bool(found) and not may_evict(
                found, life[0], is_proven=is_proven, now=now, generation=generation
            )

        return set(filter(is_protected, lives))


def _without_seats(record: TermRecord) -> tuple[object, ...]:
    """Return the fields that differ between two records of a group, except for their seats."""
    return record.opening, record.term.number, record.generation, record.recall
