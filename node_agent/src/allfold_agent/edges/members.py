"""The nodes of a group by name: where they listen, and which life in the group each has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from allfold_core.survival.records import Term
from allfold_core.topology import Member

GroupLife = tuple[str, int]
"""A node, and the number of the term that has let it in."""


def lives_of(term: Term) -> frozenset[GroupLife]:
    """Return the lives of the nodes of a term."""
    return frozenset(zip(term.voters, term.joined, strict=True))


class GroupNodes(Mapping[str, Member]):
    """All nodes that a group has had, by name.

    A node that leaves and comes back has another life in the group, and other edges: it numbers its
    frames anew. The lock of the group's ops protects it; a reader needs none.

    Args:
        members: of the plan with which this node has come into the group.
        term: the first that it knows.
    """

    def __init__(self, members: Collection[Member], term: Term) -> None:
        self._members = {member.node: member for member in members}
        self._joined = dict(lives_of(term))

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def life_of(self, node: str) -> GroupLife | None:
        """Return the present life of a node; ``None`` where the group goes on without it."""
        joined = self._joined.get(node)
        return None if joined is None else (node, joined)

    def name_of_life(self, node: str) -> str:
        """Return the name of a node's present life, for requests; empty where it has none."""
        joined = self._joined.get(node)
        return "" if joined is None else f"{self._members[node].incarnation}.{joined}"

    def welcome(self, newcomers: Collection[Member], term: Term) -> None:
        """Take in the nodes that a term has let in."""
        joined = dict(lives_of(term))
        self._members |= {member.node: member for member in newcomers}
        self._joined |= {member.node: joined[member.node] for member in newcomers}

    def dismiss(self, lives: Collection[GroupLife]) -> None:
        """Note that the group goes on without some lives."""
        for node, joined in lives:
            if self._joined.get(node) == joined:
                del self._joined[node]
