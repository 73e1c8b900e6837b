"""The record of a group's term, and what agents report of it. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from allfold_core.plan import Plan
from allfold_core.survival.plans import term_fields
from allfold_core.survival.records import Seat, Term
from allfold_core.topology import Member

Life = tuple[str, str]
"""A node by its name, in one incarnation."""


@dataclass(frozen=True, slots=True)
class StoreLife:
    """One life of the store: its generation, and the server's own name for this life of it."""

    generation: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Voter:
    """One node of a term: its life, and where it listens."""

    incarnation: str
    data_address: str
    control_url: str
    device_type: str = "cpu"
    zone: str = ""

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


@dataclass(frozen=True, slots=True)
class TermRecord:
    """The record of a group's term.

    Attributes:
        epoch: of the plan with which the group was opened; a later opening of its name has a
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

    epoch: int
    term: Term
    voters: Mapping[str, Voter]
    seats: tuple[Seat, ...]
    generation: int
    recall: Recall | None = None
    plan: Plan | None = None

    def is_trusted(self, now: float) -> bool:
        """Return True unless agents may still report a newer term."""
        return self.recall is None or now >= self.recall.until

    @property
    def is_unclaimed(self) -> bool:
        """True after the loss of a record until the first of its voters has registered."""
        return self.recall is not None and self.recall.registered.isdisjoint(self.voters)

    def follows(self, other: TermRecord) -> bool:
        """Return True if this is a newer term, or one of a later opening of the group."""
        return (self.epoch, self.term.number) > (other.epoch, other.term.number)

    @property
    def lives(self) -> set[Life]:
        """The voters, each in its incarnation."""
        return {(name, voter.incarnation) for name, voter in self.voters.items()}

    def has(self, life: Life) -> bool:
        """Return True if this incarnation of a node is a voter."""
        voter = self.voters.get(life[0])
        return voter is not None and voter.incarnation == life[1]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which :meth:`from_dict` reads."""
        recall = self.recall
        return {
            "epoch": self.epoch,
            "term": term_fields(self.term),
            "voters": {name: asdict(voter) for name, voter in self.voters.items()},
            "seats": [[seat.session, seat.node] for seat in self.seats],
            "generation": self.generation,
            "recall": recall and {"until": recall.until, "registered": sorted(recall.registered)},
            "plan": self.plan and self.plan.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TermRecord:
        """Return the record that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        term, recall = data["term"], data["recall"]
        lost = tuple((node, how) for node, how in term["lost"])
        newcomers = term.get("newcomers", ())
        members = tuple(Member(**{**member, "ranks": ()}) for member in newcomers)
        lists = {
            "voters": tuple(term["voters"]),
            "joined": tuple(term["joined"]),
            "lost": lost,
            "newcomers": members,
        }
        plan = data.get("plan")
        return cls(
            epoch=data["epoch"],
            term=Term(**{**term, **lists}),
            voters={name: Voter(**voter) for name, voter in data["voters"].items()},
            seats=tuple(Seat(session, node) for session, node in data["seats"]),
            generation=data["generation"],
            recall=recall and Recall(recall["until"], frozenset(recall["registered"])),
            plan=plan and Plan.from_dict(plan),
        )


@dataclass(frozen=True, slots=True)
class Registration:
    """The report of an agent on one group when it registers with the store.

    Attributes:
        life: the node, in its incarnation.
        generation: of the store with which it registered last; 0 before the first time.
        held: the newest term that it has taken, with the generation in which it was announced.
        is_out: a term has left it out, so it takes part in nothing.
    """

    life: Life
    generation: int
    held: TermRecord
    is_out: bool = False
