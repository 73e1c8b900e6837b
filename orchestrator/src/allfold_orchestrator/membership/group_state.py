"""The state of one group, its events and its instructions. Values only, no behaviour.

Ranks take seats in a :class:`Formation`; when every seat is taken it becomes an :class:`Opening`
with a plan. When a rank leaves the opening goes on with the others, and it is over when the last
one has left. The next formation may begin as soon as the first one left, but becomes an opening
only when the last one has: until then the name is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from allfold_core.errors import AllfoldError
from allfold_core.group_options import GroupOptions
from allfold_core.plan import Plan
from allfold_core.survival.term_record import Life, TermRecord
from allfold_core.topology import Member
from allfold_orchestrator.membership.rank_map import RankMap


class Reason(Enum):
    """The reason for which a rank gave up its seat."""

    FINISHED = "finished"
    WITHDRAWN = "withdrawn"
    LOST = "lost"
    NODE_LOST = "node_lost"

    @property
    def is_loss(self) -> bool:
        """True unless the rank left on its own."""
        return self in (Reason.LOST, Reason.NODE_LOST)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One incarnation of a node agent; a restarted agent is the same node in another one.

    ``latency`` (seconds) and ``bandwidth`` (bytes per second) are those of its slowest link, as far
    as it has measured any; 0 where it has not. ``cores`` are those that its agent may run on, 0
    where it has not said. ``version`` is that of its agent, empty where it has not said.
    """

    node: str
    incarnation: str
    control_url: str
    data_address: str
    device_type: str = "cpu"
    zone: str = ""
    latency: float = 0.0
    bandwidth: float = 0.0
    cores: int = 0
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def member(self, ranks: Iterable[int] = ()) -> Member:
        """Return it as a node of a plan."""
        return Member(
            node=self.node,
            control_url=self.control_url,
            data_address=self.data_address,
            ranks=tuple(ranks),
            device_type=self.device_type,
            zone=self.zone,
            incarnation=self.incarnation,
        )


@dataclass(frozen=True, slots=True)
class RankSeat:
    """The holder of a rank: the agent it joined through, and the session of its process."""

    node: NodeInfo
    session: str

    @property
    def life(self) -> Life:
        """The node and its incarnation."""
        return self.node.node, self.node.incarnation


@dataclass(frozen=True, slots=True)
class GroupParams:
    """The parameters on which all ranks of a group must agree when they register."""

    world_size: int
    options: GroupOptions

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"world_size": self.world_size, **self.options.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the parameters in a message or record, which may have other fields too."""
        return cls(data["world_size"], GroupOptions.from_dict(data))


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The link parameters that an operator has set; ``None`` where measurements decide.

    ``latency`` is in seconds, ``bandwidth`` in bytes per second and direction.
    """

    latency: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Formation:
    """An opening in the making: the first rank fixed ``params``, the others must bring the same.

    ``departed`` are the ranks that had a seat, gave it up, and have not come again.
    ``generation`` is that of the store when the last rank of them all came. ``refused`` is what the
    last rank was told that did not fit: those that wait for it hear of it when their time is over.
    """

    opening: int
    params: GroupParams
    links: LinkSettings
    seats: RankMap[RankSeat] = field(default_factory=RankMap)
    departed: RankMap[Reason] = field(default_factory=RankMap)
    generation: int = 0
    refused: str = ""

    @property
    def missing(self) -> list[int]:
        """The ranks without a seat."""
        return [rank for rank in range(self.params.world_size) if rank not in self.seats]

    @property
    def full(self) -> bool:
        """True if every rank has its seat."""
        return len(self.seats) == self.params.world_size

    @property
    def gave_up(self) -> list[int]:
        """The missing ranks that came before and withdrew, because others did not come in time."""
        return sorted(r for r, reason in self.departed.items() if reason is Reason.WITHDRAWN)

    def ranks_of(self, life: Life) -> tuple[int, ...]:
        """Return the ranks that this incarnation of a node holds."""
        seats = self.seats.items()
        return tuple(sorted(rank for rank, seat in seats if seat.life == life))


def params_of(plan: Plan) -> GroupParams:
    """Return the parameters on which the ranks of a plan agreed."""
    return GroupParams(plan.world_size, plan.options)


@dataclass(frozen=True, slots=True)
class Opening:
    """A completed opening: its plan, its seats, and the ranks that have left, and why."""

    plan: Plan
    seats: RankMap[RankSeat]
    departed: RankMap[Reason] = field(default_factory=RankMap)

    @property
    def params(self) -> GroupParams:
        """The parameters on which the ranks agreed."""
        return params_of(self.plan)

    def ranks_of(self, life: Life) -> tuple[int, ...]:
        """Return the ranks that this incarnation of a node holds or held."""
        ranks: Iterable[int] = self.plan.ranks_on(life[0])
        if self.plan.options.is_elastic:  # others have come since
            ranks = sorted(self.seats)
        return tuple(rank for rank in ranks if self.seats[rank].life == life)

    @property
    def intact(self) -> bool:
        """True until the first rank leaves."""
        return not self.departed

    @property
    def closed(self) -> bool:
        """True once all ranks have left."""
        return len(self.departed) == len(self.seats)

    @property
    def present(self) -> dict[int, RankSeat]:
        """The seats of the ranks that have not left."""
        return {rank: seat for rank, seat in self.seats.items() if rank not in self.departed}


@dataclass(frozen=True, slots=True)
class GroupState:
    """One group.

    Attributes:
        group: its name.
        last_opening: the highest opening ever used under this name; never falls.
        recalled: the highest opening that is known from the agents' reports alone, because the
            orchestrator lost its own state; 0 if there is none.
        forming: the next opening, while ranks are missing or the current one still has some.
        current: the last opening that was completed.
        term: the nodes that decide together in ``current``, until its last rank has left. Its
            seats are those of ``current``; without one, because the orchestrator lost it, they
            are what agents reported.
        token: the name of the token for which it counts: that of whoever began its last formation.
    """

    group: str
    last_opening: int = 0
    recalled: int = 0
    forming: Formation | None = None
    current: Opening | None = None
    term: TermRecord | None = None
    token: str = ""

    @property
    def is_free(self) -> bool:
        """True if no rank of a completed opening has the name."""
        return self.term is None and (self.current is None or self.current.closed)

    @property
    def idle(self) -> bool:
        """True if no rank has a seat."""
        return self.forming is None and self.is_free


# Events: what can happen to a group.


@dataclass(frozen=True, slots=True)
class StoreLife:
    """One life of the store: its generation, and the server's own name for this life of it."""

    generation: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Join:
    """A rank asks for its seat, in a group that forms or one that runs and takes in others.

    Attributes:
        rank: ``None`` for whichever is free.
        links: used if this join opens a formation.
        store: its life now, where it is known.
        now: the store's time.
        token: the name of its agent's token.
    """

    rank: int | None
    seat: RankSeat
    params: GroupParams
    links: LinkSettings = field(default_factory=LinkSettings)
    store: StoreLife | None = None
    now: float = 0.0
    token: str = ""

    @property
    def generation(self) -> int:
        """The generation of the store."""
        return self.store.generation if self.store else 0


@dataclass(frozen=True, slots=True)
class Leave:
    """A rank gives up its seat.

    Attributes:
        ended: the opening that ended before the rank was in: its nodes told the rank that all other
            ranks had left; 0 if they did not.
        store: the store's present life, if known.
        was_joining: its node may not know yet that the group is complete.
    """

    rank: int
    session: str
    reason: Reason
    ended: int = 0
    store: StoreLife | None = None
    was_joining: bool = False


@dataclass(frozen=True, slots=True)
class NodesLost:
    """These lives of nodes are over, all at once; each with how that is known.

    ``store`` is the store's life now, where it is known, and ``until`` the end of the grace in
    which agents may register, if a record turns out to be of an earlier one.
    """

    lives: Mapping[Life, str]
    store: StoreLife | None = None
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeHolds:
    """A node reports an opening of this group that it is running."""

    node: str
    opening: int


@dataclass(frozen=True, slots=True)
class AgentRegisters:
    """An agent says which term of this group it has taken.

    Attributes:
        life: the node, in its incarnation.
        generation: of the store with which it registered last; 0 before the first time.
        held: the newest term that it has taken, with the generation in which it was announced.
        store: the store's life with which it registers now.
        until: the end of the grace in which others may do so, if a loss of the record shows here.
        is_out: a term has left it out, so it takes part in nothing.
    """

    life: Life
    generation: int
    held: TermRecord
    store: StoreLife
    until: float
    is_out: bool = False


Event = Join | Leave | NodesLost | NodeHolds | AgentRegisters


# Instructions: what follows from an event, for the caller to act on.


@dataclass(frozen=True, slots=True)
class Seated:
    """The rank has its seat, in an opening that is forming or (``ready``) complete."""

    rank: int
    opening: int
    ready: bool


@dataclass(frozen=True, slots=True)
class PlanReady:
    """The last seat was taken: this plan holds from now on."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class SeatsFreed:
    """Seats of a formation are free again."""

    opening: int
    ranks: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class RanksDeparted:
    """Ranks of a completed opening have left it."""

    opening: int
    ranks: tuple[int, ...]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Rejected:
    """The event was refused and changed nothing."""

    error: AllfoldError


@dataclass(frozen=True, slots=True)
class AgentRegistered:
    """The agent's report is in the record; ``is_out``: a term has left the agent out."""

    is_out: bool


@dataclass(frozen=True, slots=True)
class LossShown:
    """The agent knows more than the store: its generation has to grow above the reported one."""

    reported: int


Instruction = (
    AgentRegistered | LossShown | Seated | PlanReady | SeatsFreed | RanksDeparted | Rejected
)
Outcome = tuple[GroupState, tuple[Instruction, ...]]
