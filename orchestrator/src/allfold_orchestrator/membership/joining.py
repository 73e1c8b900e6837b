"""Ranks that join a group while it runs: their seats, and the terms that let in their nodes. Pure.

Where the orchestrator has lost its state, all that it needs is in the record of the term, which the
agents have reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allfold_core.errors import AllfoldError, GroupFull, RegisterParamsMismatch, ServiceError
from allfold_core.schema import work_together
from allfold_core.survival.records import Seat
from allfold_core.survival.term_record import Life, TermRecord
from allfold_core.verdict import counted
from allfold_orchestrator.membership.group_state import (
    GroupParams,
    GroupState,
    Join,
    Leave,
    NodeInfo,
    Opening,
    Outcome,
    RankSeat,
    Reason,
    Rejected,
    Seated,
    params_of,
)
from allfold_orchestrator.membership.rank_map import RankMap
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.terms import admit, recalled, without_empty_node


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
    """One index for the current opening and one for the next: sharing one would rebuild it."""

    current: SeatFinder = field(default_factory=SeatFinder)
    forming: SeatFinder = field(default_factory=SeatFinder)


def running_params(state: GroupState) -> GroupParams | None:
    """Return the parameters of a group that runs; ``None`` where none does, or they are lost."""
    if state.term is None:
        return None
    if state.current is not None and state.current.plan.opening == state.term.opening:
        return state.current.params
    return None if state.term.plan is None else params_of(state.term.plan)


def takes_in(state: GroupState) -> bool:
    """Return True if a group runs that ranks may join."""
    params = running_params(state)
    return params is not None and params.options.is_elastic


def is_unclaimed(state: GroupState, join: Join) -> bool:
    """Return True if the store has lost something since the term, and none of its nodes has told.

    It may be the record of a group that is long over, or an old one of a group that runs.
    """
    if state.term is None:
        return False
    return _recalled(state.term, join).is_unclaimed


def is_known(state: GroupState, join: Join) -> bool:
    """Return True if what is recorded of a group that runs is what its nodes know.

    Where its opening was lost too, each of them has yet to report which of its ranks have left.
    """
    if state.current is not None or state.term is None:
        return not is_unclaimed(state, join)
    return _recalled(state.term, join).is_trusted(join.now)


def is_whole(state: GroupState) -> bool:
    """Return True if no rank has left the group that runs; its name is then for nobody else."""
    params = running_params(state)
    if state.current is not None:
        return state.current.intact
    return params is not None and len(holders(state)) == params.world_size


def has_come_back(state: GroupState) -> bool:
    """Return True if the group runs with all of its ranks, as all of its nodes have reported."""
    return state.term is not None and state.term.recall is None and is_whole(state)


def holders(state: GroupState) -> dict[int, str]:
    """Return the ranks that have the name of a group, with their nodes.

    Those of a record that agents have reported are numbered without gaps.
    """
    if state.current is not None:
        return {rank: seat.node.node for rank, seat in state.current.present.items()}
    seats = () if state.term is None else state.term.seats
    return {rank: seat.node for rank, seat in enumerate(seats)}


def _recalled(record: TermRecord, join: Join) -> TermRecord:
    return record if join.store is None else recalled(record, join.store, join.now + 1.0)


def join_running(state: GroupState, join: Join) -> Outcome:
    """Give a rank a seat in a group that runs; its node gets a vote, if it has none."""
    record, params = state.term, running_params(state)
    assert record is not None and params is not None, "the group runs"
    known = _seat_of(state, join.seat.session)
    if known is not None:  # the answer to the first join was lost
        return state, (Seated(known, record.opening, ready=True),)
    refusal = (
        _not_now(state.group, record, join)
        or _other_release(state, join)
        or _full(state, params, join)
    )
    if refusal is not None:
        return state, (Rejected(refusal),)
    node = join.seat.node
    if not record.has(join.seat.life):
        record = admit(record, node.member())
    rank, state = _with_seat(replace(state, term=record), join.seat)
    return state, (Seated(rank, record.opening, ready=True),)


def without_node_of(before: GroupState, state: GroupState, leave: Leave) -> GroupState:
    """Return a group after a rank has left it, without its node if that has no other rank.

    The node is removed in two cases only: it joined the running group, and the rank ended by
    itself; or the rank ended while the plan was on its way, so that nobody knows if the node has
    heard that it is in.
    """
    if state is before or leave.reason is Reason.FINISHED:
        return state  # first: with all its seats, the record of a large group takes long to make
    old, record = term_record(before), term_record(state)
    if old is None or record is None:
        return state
    node = next((seat.node for seat in old.seats if seat.session == leave.session), "")
    narrowed = without_empty_node(record, node, leave.store, was_joining=leave.was_joining)
    if narrowed is None:
        return state
    return replace(state, term=replace(narrowed, seats=()) if _of_term(state) else narrowed)


def _not_now(group: str, record: TermRecord, join: Join) -> AllfoldError | None:
    """Return the error of a rank that should ask again soon."""
    node = join.seat.node.node
    record = _recalled(record, join)
    if record.is_unclaimed or not record.is_trusted(join.now):
        return ServiceError(
            f"group {group} takes in nobody at the moment: the orchestrator may have lost a newer "
            "record of it, and waits for what its nodes report; if none does, the group is over",
            group=group,
        )
    if node in record.voters and not record.has(join.seat.life):
        return ServiceError(
            f"group {group} takes in node {node} when it has been agreed that its earlier life, "
            "which is in the group, is over",
            group=group,
            node=node,
        )
    return None


def other_release(
    group: str, seats: Mapping[int, RankSeat], newcomer: NodeInfo
) -> AllfoldError | None:
    """Return the error of a rank whose agent those of the group do not understand.

    One of them is looked at: they understand each other.
    """
    other = next((seat.node for seat in seats.values()), newcomer)
    if work_together(other.version, newcomer.version):
        return None
    return RegisterParamsMismatch(
        f"the agent of node {newcomer.node} is Allfold {newcomer.version}, that of node "
        f"{other.node}, which is in group {group}, {other.version}: they do not understand each "
        "other. Bring all agents to one release before a group spans their nodes",
        group=group,
        node=newcomer.node,
        differing=["version"],
    )


def _other_release(state: GroupState, join: Join) -> AllfoldError | None:
    opening = _of_term(state)
    if opening is None:  # the store has lost the seats, and no agent's record has versions
        return None
    return other_release(state.group, opening.present, join.seat.node)


def _full(state: GroupState, params: GroupParams, join: Join) -> AllfoldError | None:
    taken, most = len(_present(state)), params.options.max_world
    if most is None or taken < most:
        return None
    return GroupFull(
        f"group {state.group} has {counted(taken, 'rank')}, and max_world is {most}: "
        f"one more, on node {join.seat.node.node}, can join when one of them has left",
        group=state.group,
        max_world=most,
        node=join.seat.node.node,
    )


def _of_term(state: GroupState) -> Opening | None:
    """Return the opening in which the term's seats are, unless the orchestrator has lost it."""
    current, term = state.current, state.term
    return current if current and term and current.plan.opening == term.opening else None


def _present(state: GroupState) -> list[str]:
    opening, term = _of_term(state), state.term
    if opening is not None:
        return [seat.session for seat in opening.present.values()]
    return [seat.session for seat in term.seats] if term else []


def _seat_of(state: GroupState, session: str) -> int | None:
    opening = _of_term(state)
    if opening is None:
        sessions = _present(state)
        return sessions.index(session) if session in sessions else None
    seats = opening.present.items()
    return next((rank for rank, seat in seats if seat.session == session), None)


def _with_seat(state: GroupState, seat: RankSeat) -> tuple[int, GroupState]:
    """Return the number of a free seat, and the group in which it is taken."""
    opening, term = _of_term(state), state.term
    assert term is not None
    if opening is None:
        seats = (*term.seats, Seat(seat.session, seat.node.node))
        return len(term.seats), replace(state, term=replace(term, seats=seats))
    rank = min(opening.departed, default=len(opening.seats))
    opening = replace(
        opening,
        seats=opening.seats.updated({rank: seat}),
        departed=opening.departed.without((rank,)),
    )
    return rank, replace(state, current=opening)
