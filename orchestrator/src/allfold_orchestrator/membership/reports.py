"""Reports of agents on groups of which they know more than the orchestrator."""

from __future__ import annotations

from dataclasses import replace

from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    GroupState,
    Instruction,
    LossShown,
    NodeHolds,
    NodesLost,
    Opening,
    Outcome,
    RanksDeparted,
    RankSeat,
    Reason,
)
from allfold_orchestrator.membership.terms import (
    evict,
    register,
    seats_of,
    shows_loss,
    without_seats,
)


def node_holds(state: GroupState, holds: NodeHolds) -> Outcome:
    """Never reuse an opening that an agent knows: agents outlive the orchestrator's state."""
    return _above(state, holds.opening), ()


def _above(state: GroupState, opening: int) -> GroupState:
    if opening <= state.last_opening:
        return state
    forming = state.forming
    if forming is not None and forming.opening <= opening:
        forming = replace(forming, opening=opening + 1)
    return replace(state, last_opening=opening, recalled=opening, forming=forming)


def term_record(state: GroupState) -> TermRecord | None:
    """Return the record of the term with its seats."""
    term = state.term
    if term is None or not _has_seats(state.current, term):
        return term
    assert state.current is not None
    return replace(term, seats=seats_of(state.current.present))


def _has_seats(current: Opening | None, term: TermRecord) -> bool:
    """Return True if the opening says who sits in the term: the orchestrator has not lost it."""
    return current is not None and current.plan.opening == term.opening


def without_lives(state: GroupState, lost: NodesLost) -> GroupState:
    """Return the group with a term without these lives of nodes; their ranks leave next."""
    record = term_record(state)
    if record is None:
        return state
    left = evict(record, lost.lives, lost.store, lost.until)
    if left is None:
        return replace(state, term=None, recalled=0)  # a late report must not bring it back
    if not _has_seats(state.current, left):
        return replace(state, term=left)
    return state if left is record else replace(state, term=replace(left, seats=()))


def without_reported_seat(state: GroupState, session: str) -> GroupState:
    """Return the group after a rank left that is known from reports alone."""
    if state.term is None or not state.term.seats:
        return state
    left = without_seats(state.term, {session})
    if left is state.term:
        return state
    if not left.seats:
        return replace(state, term=None, recalled=0)  # a late report must not bring it back
    return replace(state, term=left)


def end_term(state: GroupState, reason: Reason) -> Outcome:
    """Return the group without its term, in which no rank is left; its seats count as departed."""
    ended = replace(state, term=None, recalled=0)  # a late report must not bring it back
    current = state.current
    if current is None or state.term is None or not _has_seats(current, state.term):
        return ended, ()
    left = dict.fromkeys(current.present, reason)
    current = replace(current, departed=current.departed.updated(left))
    departed = RanksDeparted(current.plan.opening, tuple(sorted(left)), reason)
    return replace(ended, current=current), (departed,)


def agent_registers(state: GroupState, report: AgentRegisters) -> Outcome:
    """Note the term that an agent holds, see :func:`register`."""
    record = term_record(state)
    if record is None and _is_over(state, report.held.opening):
        return state, (AgentRegistered(is_out=True),)
    if shows_loss(record, report):
        return state, (LossShown(report.generation),)
    answer = register(record, report)
    if answer.record is not None:
        state = _above(state, answer.record.opening)
    elif not answer.is_out:
        state = replace(state, recalled=0)  # a late report must not bring it back
    departed: tuple[Instruction, ...] = ()
    if answer.record != record:
        state, departed = _with_record(state, answer.record, report.life[0])
    return state, (*departed, AgentRegistered(answer.is_out))


def _is_over(state: GroupState, opening: int) -> bool:
    """Return True if all ranks of this opening are known to have left, or a later one followed."""
    return opening < state.last_opening or (
        opening == state.last_opening and opening != state.recalled
    )


def _with_record(state: GroupState, record: TermRecord | None, reporter: str) -> Outcome:
    """Return the group with this term; ranks of the opening whose node is not in it are lost.

    Where ranks have come that the opening does not know, it is an old one: the record knows better.
    """
    current = state.current
    if current is None or (record is not None and _knows_more(record, current)):
        return replace(state, term=record, current=None), ()
    gone = {
        rank: reason
        for rank, seat in current.present.items()
        if (reason := _end_of(seat, record, reporter)) is not None
    }
    current = replace(current, departed=current.departed.updated(gone))
    term = None if record is None or current.closed else replace(record, seats=())
    departed = tuple(
        RanksDeparted(current.plan.opening, ranks, reason)
        for reason in (Reason.NODE_LOST, Reason.FINISHED)
        if (ranks := tuple(sorted(rank for rank, how in gone.items() if how is reason)))
    )
    return replace(state, term=term, current=current), departed


def _knows_more(record: TermRecord, current: Opening) -> bool:
    """Return True if ranks have a seat that the opening does not have."""
    if not _has_seats(current, record):
        return True
    known = {(seat.session, seat.life) for seat in current.seats.values()}
    lives = {node: (node, voter.incarnation) for node, voter in record.voters.items()}
    return any((seat.session, lives.get(seat.node)) not in known for seat in record.seats)


def _end_of(seat: RankSeat, record: TermRecord | None, reporter: str) -> Reason | None:
    """Return why a rank is in the group no more; ``None`` where it still is.

    A node knows better than an old record which of its ranks have left.
    """
    if record is None or not record.has(seat.life):
        return Reason.NODE_LOST
    is_there = any(each.session == seat.session for each in record.seats)
    return None if is_there or seat.node.node != reporter else Reason.FINISHED
