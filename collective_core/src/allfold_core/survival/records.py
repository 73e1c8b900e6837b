"""The members of a group at one time: terms, epochs and the stamps that order them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from allfold_core.schema import Form, Generation, LastSeq, Number, OpeningNumber, Seq
from allfold_core.topology import AS_OPENED, Layout, Member

_ROUND_BITS = 24
_GENERATION_BITS = 12
_BRANCH_BITS = 4


class Stamp(NamedTuple):
    """The fencing token of one epoch, in every frame: those that one node installs only grow.

    Attributes:
        term: the number of the term that made the epoch.
        round: the round of that term.
        generation: the life of the orchestrator's store in which the term was decided; tells two
            terms of one number apart after the record was lost.
        branch: tells apart the epochs of one round: ops that began before others joined are run
            again without these.
    """

    term: int
    round: int
    generation: int
    branch: int = 0

    def pack(self) -> int:
        """The stamp in 64 bits, which compare as the stamps do."""
        packed = (self.term << _ROUND_BITS | self.round) << _GENERATION_BITS | self.generation
        return packed << _BRANCH_BITS | self.branch

    def check(self) -> Stamp:
        """Return it; ``ValueError`` where it has no room in 64 bits."""
        if not 0 <= self.pack() < 1 << 64 or Stamp.unpack(self.pack()) != self:
            raise ValueError(f"{self} has no room in 64 bits")
        return self

    @classmethod
    def unpack(cls, packed: int) -> Stamp:
        """The inverse of :meth:`pack`."""
        rest, branch = packed >> _BRANCH_BITS, packed & (1 << _BRANCH_BITS) - 1
        rest, generation = rest >> _GENERATION_BITS, rest & (1 << _GENERATION_BITS) - 1
        return cls(rest >> _ROUND_BITS, rest & (1 << _ROUND_BITS) - 1, generation, branch)


def _read_stamp(packed: Any) -> Stamp:
    if type(packed) is not int:
        raise TypeError("a stamp is a number")
    stamp = Stamp.unpack(packed)
    return stamp if stamp == _NO_STAMP else stamp.check()


_NO_STAMP = Stamp(-1, 0, 0)
PackedStamp = Annotated[Stamp, Form(_read_stamp, Stamp.pack)]


class Seat(NamedTuple):
    """One rank of an epoch; its rank number is its place among the seats.

    Attributes:
        session: one registration of one process with the group; never used again.
        node: whose agent serves it.
        number: of the seat, among all that the group ever had; the same in every epoch.
        since: its first op.
    """

    session: str
    node: str
    number: Number = 0
    since: Seq = 0


MOST_EPOCHS_OF_A_ROUND = 1 << _BRANCH_BITS


def _read_newcomer(fields: Any) -> Member:
    if not all(isinstance(value, str) for value in fields.values()):
        raise TypeError("the fields of a node are texts")
    return Member(**fields, ranks=())


def _written_newcomer(member: Member) -> dict[str, str]:
    return {name: value for name, value in vars(member).items() if name != "ranks"}


@dataclass(frozen=True)
class Term:
    """One set of nodes of a group, decided by the orchestrator.

    Attributes:
        number: grows with every term of the group.
        generation: the life of the store in which it was decided.
        voters: the nodes whose report every round needs; the first is the leader.
        joined: by voter, the number of the term that let it in.
        lost: the nodes that this term leaves out, each with how its loss is known.
        newcomers: those of the voters that were not in the plan of the opening, without ranks.
    """

    number: OpeningNumber
    generation: Generation
    voters: tuple[str, ...]
    joined: tuple[OpeningNumber, ...]
    lost: tuple[tuple[str, str], ...] = ()
    newcomers: tuple[Annotated[Member, Form(_read_newcomer, _written_newcomer)], ...] = ()

    def check(self) -> Term:
        """Return it; ``ValueError`` where it is none that machines can work with."""
        if not len({*self.voters}) == len(self.voters) == len(self.joined) > 0:
            raise ValueError("a term names each of its voters once, with a number")
        Stamp(self.number, 0, self.generation).check()
        return self

    @property
    def leader(self) -> str:
        """The node that runs the rounds of this term."""
        return self.voters[0]

    def has_come_back(self, node: str, older: Term) -> bool:
        """Return True if a node of an older term was left out since, and has joined anew."""
        return self._joined.get(node, older.number) > older.number

    def members_of(self, epoch: Epoch) -> frozenset[str]:
        """Return the nodes of an epoch that still vote and have not left and joined anew."""
        return frozenset(node for node in epoch.nodes if self.is_member(node, epoch))

    def is_member(self, node: str, epoch: Epoch) -> bool:
        """Return True if a node votes, and did when the epoch was made, and ever since."""
        term = epoch.stamp.term
        return self._joined.get(node, term + 1) <= term

    @cached_property
    def _joined(self) -> dict[str, int]:
        return dict(zip(self.voters, self.joined, strict=True))

    def may_follow(self, older: Term) -> bool:
        """Return True if a node that holds ``older`` may take this term.

        A node that was once left out must not come back as if it had never left: every voter that
        joined no later than the older term has to be a voter of the older term.
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

    Epochs that only differ in the layout have the same ordinal: for the ranks nothing has changed.

    Attributes:
        stamp: of the round that made it.
        ordinal: how many memberships the group had before.
        seats: of the ranks, by rank number.
        change: the error that says who was lost or has joined, as JSON; ``""`` of the first
            membership.
        layout: the order of the nodes.
        seated: the number of seats that the group has had so far, which is the next one's number.
        waiting: the sessions that wait to join or to leave at the announced boundary, in groups
            that change at commits only.
        boundaries: the number of boundaries announced so far.
    """

    stamp: PackedStamp
    ordinal: LastSeq
    seats: tuple[Seat, ...]
    change: str = ""
    layout: Layout = AS_OPENED
    seated: Number = 0
    waiting: tuple[str, ...] = ()
    boundaries: Number = 0

    @property
    def boundary(self) -> int:
        """The number of the boundary that is announced; 0 while no rank waits."""
        return self.boundaries if self.waiting else 0

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

    def since_of(self, session: str) -> int:
        """Return the first op of a session of this epoch."""
        return self._since[session]

    def beginners(self, seq: int) -> frozenset[str]:
        """Return the sessions that joined the running group, and whose first op this is.

        Those of the opening begin with op 0, as do those that joined before any op: these are none.
        """
        return frozenset(seat.session for seat in self.seats if 0 < seat.since == seq)

    @cached_property
    def first_op_of_all(self) -> int:
        """The first op in which all of its ranks have a part; earlier ones began before it."""
        return max((seat.since for seat in self.seats), default=0)

    @cached_property
    def _since(self) -> dict[str, int]:
        return {seat.session: seat.since for seat in self.seats}

    def remaining(self, dead: Collection[str], nodes: Collection[str]) -> tuple[Seat, ...]:
        """The seats of the sessions that are not dead, on these nodes; their order is kept."""
        return tuple(s for s in self.seats if s.session not in dead and s.node in nodes)


NO_EPOCH = Epoch(_NO_STAMP, -1, ())
"""The epoch of a node that is not in the group yet; older than any other epoch."""
