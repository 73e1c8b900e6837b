"""The members of a group at one time: terms, epochs and the stamps that order them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from allfold_core.plan import AS_OPENED, Layout

_ROUND_BITS = 28
_GENERATION_BITS = 12


class Stamp(NamedTuple):
    """The fencing token of one epoch, in every frame: those that one node installs only grow.

    Attributes:
        term: the number of the term that made the epoch.
        round: the round of that term.
        generation: the life of the orchestrator's store in which the term was decided; tells two
            terms of one number apart after the record was lost.
    """

    term: int
    round: int
    generation: int

    def pack(self) -> int:
        """The stamp in 64 bits, which compare as the stamps do."""
        return (self.term << _ROUND_BITS | self.round) << _GENERATION_BITS | self.generation

    @classmethod
    def unpack(cls, packed: int) -> Stamp:
        """The inverse of :meth:`pack`."""
        rest, generation = packed >> _GENERATION_BITS, packed & (1 << _GENERATION_BITS) - 1
        return cls(rest >> _ROUND_BITS, rest & (1 << _ROUND_BITS) - 1, generation)


class Seat(NamedTuple):
    """One rank of an epoch; its number is its place among the seats.

    Attributes:
        session: one registration of one process with the group; never used again.
        node: whose agent serves it.
    """

    session: str
    node: str


@dataclass(frozen=True)
class Term:
    """One set of nodes of a group, decided by the orchestrator.

    Attributes:
        number: grows with every term of the group.
        generation: the life of the store in which it was decided.
        voters: the nodes whose report every round needs; the first is the leader.
        joined: by voter, the number of the term that let it in.
        lost: the nodes that this term leaves out, each with how its loss is known.
    """

    number: int
    generation: int
    voters: tuple[str, ...]
    joined: tuple[int, ...]
    lost: tuple[tuple[str, str], ...] = ()

    @property
    def leader(self) -> str:
        """The node that runs the rounds of this term."""
        return self.voters[0]

    def may_follow(self, older: Term) -> bool:
        """Return True if a node that holds ``older`` may take this term.

        Nobody who was left out once comes back as a member that never left: every voter that is
        not newer than the older term has to be a voter of that one.
        """
        known = frozenset(older.voters)
        return self.number > older.number and all(
            voter in known
            for voter, joined in zip(self.voters, self.joined, strict=True)
            if joined <= older.number
        )


@dataclass(frozen=True)
class Epoch:
    """One membership of a group, and the order of its nodes.

    Epochs that differ in the layout only have one ordinal: for the ranks nothing has changed.

    Attributes:
        stamp: of the round that made it.
        ordinal: how many memberships the group had before.
        seats: of the ranks, by number.
        loss: the error that says who was lost, as JSON; ``""`` of the first membership.
        layout: the order of the nodes.
    """

    stamp: Stamp
    ordinal: int
    seats: tuple[Seat, ...]
    loss: str = ""
    layout: Layout = AS_OPENED

    @cached_property
    def nodes(self) -> frozenset[str]:
        """The nodes that have a rank in it."""
        return frozenset(seat.node for seat in self.seats)

    @cached_property
    def sessions(self) -> frozenset[str]:
        """The sessions of all ranks."""
        return frozenset(seat.session for seat in self.seats)

    def sessions_on(self, node: str) -> frozenset[str]:
        """The sessions of the ranks of one node."""
        return self._by_node.get(node, frozenset())

    @cached_property
    def _by_node(self) -> dict[str, frozenset[str]]:
        return {
            node: frozenset(seat.session for seat in self.seats if seat.node == node)
            for node in self.nodes
        }

    def remaining(self, dead: Collection[str], nodes: Collection[str]) -> tuple[Seat, ...]:
        """The seats of the sessions that are not dead, on these nodes; their order is kept."""
        return tuple(s for s in self.seats if s.session not in dead and s.node in nodes)
