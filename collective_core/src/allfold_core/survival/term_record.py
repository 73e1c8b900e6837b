"""The record of a group's term. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from allfold_core.plan import Plan
from allfold_core.schema import (
    Address,
    ControlUrl,
    Form,
    Generation,
    Name,
    OpeningNumber,
)
from allfold_core.survival.records import Seat, Term
from allfold_core.topology import Member

Life = tuple[str, str]
"""A node by its name, in one incarnation."""


@dataclass(frozen=True, slots=True)
class Voter:
    """One node of a term: its life, and where it listens."""

    incarnation: Name
    data_address: Address
    control_url: ControlUrl
    device_type: str = "cpu"
    zone: str = ""

    @classmethod
    def of(cls, member: Member) -> Voter:
        """Return a node of a plan as one of a term."""
        place = member.incarnation, member.data_address, member.control_url
        return cls(*place, member.device_type, member.zone)

    def member(self, node: str) -> Member:
        """Return it as a node of a plan, without ranks."""
        return Member(node=node, ranks=(), **asdict(self))


@dataclass(frozen=True, slots=True)
class Recall:
    """The time in which agents report to a store that may have lost something.

    Attributes:
        until: the end of the grace; every living agent has registered by then.
        registered: the voters that have.
    """

    until: float
    registered: frozenset[str] = frozenset()


def _read_seat(pair: Any) -> Seat:
    session, node = pair
    if not isinstance(session, str) or not isinstance(node, str):
        raise TypeError("a seat has the names of a session and of a node")
    return Seat(session, node)


def _written_seat(seat: Seat) -> list[str]:
    return [seat.session, seat.node]


@dataclass(frozen=True, slots=True)
class TermRecord:
    """The record of a group's term.

    Attributes:
        opening: of the plan with which the group was opened; a later opening of its name has a
            higher one, and terms of its own.
        term: the newest term.
        voters: its nodes by name.
        seats: the ranks that have not left.
        generation: of the store that keeps the record; ``term.generation`` is of the one that made
            the term.
        recall: set from the loss of a record until all its voters have registered.
        plan: on what terms the group was opened, with the number of its ranks but without them
            and their nodes. Of a group that an older release opened, the number is 0.
    """

    opening: OpeningNumber
    term: Term
    voters: Mapping[Name, Voter]
    seats: tuple[Annotated[Seat, Form(_read_seat, _written_seat)], ...]
    generation: Generation
    recall: Recall | None = None
    plan: Annotated[Plan, Form(Plan.from_dict, Plan.to_dict)] | None = None

    def is_trusted(self, now: float) -> bool:
        """Return True unless agents may still report a newer term."""
        return self.recall is None or now >= self.recall.until

    @property
    def is_unclaimed(self) -> bool:
        """True after the loss of a record until the first of its voters has registered."""
        return self.recall is not None and self.recall.registered.isdisjoint(self.voters)

    def follows(self, other: TermRecord) -> bool:
        """Return True if this is a newer term, or one of a later opening of the group."""
        return (self.opening, self.term.number) > (other.opening, other.term.number)

    @property
    def lives(self) -> set[Life]:
        """The voters, each in its incarnation."""
        return {(name, voter.incarnation) for name, voter in self.voters.items()}

    def has(self, life: Life) -> bool:
        """Return True if this incarnation of a node is a voter."""
        voter = self.voters.get(life[0])
        return voter is not None and voter.incarnation == life[1]

    def check(self) -> TermRecord:
        """Return it; ``ValueError`` unless its parts fit each other."""
        names, joined = self.term.voters, self.term.joined
        if not names or not len(names) == len(joined) == len(self.voters):
            raise ValueError("a term names each of its voters once, with an address and a number")
        if set(names) != self.voters.keys():
            raise ValueError("a term has other voters than its record")
        return self
