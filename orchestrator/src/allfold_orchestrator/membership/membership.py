"""A pure state machine of one group's membership.

``step(state, event)`` returns the next state and what follows from it. It does no I/O, reads no
clock and raises nothing: a refused event is a :class:`Rejected` instruction. Where nothing changed,
the state that comes back is the very object that went in. So a caller can replay it, race it
against other replicas, and write nothing when nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from allfold_core.errors import AllfoldError
from allfold_core.survival.plans import first_record
from allfold_core.survival.term_record import Life
from allfold_orchestrator.membership.group_state import (
    AgentRegisters,
    Event,
    Formation,
    GroupParams,
    GroupState,
    Instruction,
    Join,
    Leave,
    NodesLost,
    Opening,
    Outcome,
    PlanReady,
    RanksDeparted,
    RankSeat,
    Reason,
    Rejected,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership.joining import (
    has_come_back,
    is_known,
    is_unclaimed,
    is_whole,
    join_running,
    other_release,
    running_params,
    takes_in,
    without_node_of,
)
from allfold_orchestrator.membership.planning import make_plan
from allfold_orchestrator.membership.rank_map import RankMap
from allfold_orchestrator.membership.refusals import (
    group_is_full,
    not_registered,
    params_mismatch,
    rank_is_taken,
    rank_out_of_range,
    world_out_of_range,
)
from allfold_orchestrator.membership.reports import (
    agent_registers,
    end_term,
    node_holds,
    without_lives,
    without_reported_seat,
)

# A term has the number of its opening at first, and stamps have 24 bits for that: enough for all
# generations, which have 12.
_OPENINGS_OF_A_GENERATION = 1 << 10


def step(state: GroupState, event: Event) -> Outcome:
    """Return the state after ``event``, and what follows from it."""
    if isinstance(event, Join):
        return _join(state, event)
    if isinstance(event, Leave):
        left, outcomes = _leave(state, event)
        return without_node_of(state, left, event), outcomes
    if isinstance(event, NodesLost):
        return _nodes_lost(state, event)
    if isinstance(event, AgentRegisters):
        state, outcomes = agent_registers(state, event)
        state, freed = _end_formation_beside(state)
        state, completed = _complete_if_possible(state, event.store.generation)
        return state, outcomes + freed + completed
    return node_holds(state, event)


# Joining


def _join(state: GroupState, join: Join) -> Outcome:
    if state.forming is not None and _holds(state.forming.seats, join.rank, join.seat.session):
        return _join_again(state, join, state.forming.params, state.forming.opening, ready=False)
    current = state.current
    if takes_in(state):
        error = None if is_unclaimed(state, join) else _other_terms(state, join)
        return _reject(state, error) if error else join_running(state, join)
    if current is not None and _still_in(current, join.rank, join.seat.session):
        return _join_again(state, join, current.params, current.plan.opening, ready=True)
    if join.rank is None:
        return _join(state, replace(join, rank=_free_rank(state, join)))
    error = _refusal(state, join)
    if error is not None:
        return _reject(_with_refusal(state, error), error)
    return _take_seat(state, join)


def _free_rank(state: GroupState, join: Join) -> int:
    """Return the rank of a caller to whom any is right: its own, if it has asked before."""
    seats = state.forming.seats if state.forming else RankMap[RankSeat]()
    own = (rank for rank, seat in seats.items() if seat.session == join.seat.session)
    free = (rank for rank in range(join.params.world_size) if rank not in seats)
    return next(chain(own, free), join.params.world_size)


def _other_terms(state: GroupState, join: Join) -> AllfoldError | None:
    """Return the error of a rank that comes to a running group with other parameters."""
    params = running_params(state)
    assert params is not None and state.term is not None
    asked = replace(join.params, world_size=params.world_size)  # of the opening, which is over
    if params == asked:
        return None
    return params_mismatch(state.group, state.term.opening, params, replace(join, params=asked))


def _join_again(
    state: GroupState, join: Join, params: GroupParams, opening: int, *, ready: bool
) -> Outcome:
    """Answer a repeated join, whose first reply was lost, in the same way."""
    assert join.rank is not None
    if params != join.params:
        return _reject(state, params_mismatch(state.group, opening, params, join))
    return state, (Seated(join.rank, opening, ready),)


def _refusal(state: GroupState, join: Join) -> AllfoldError | None:
    """Return the reason for which a join cannot be granted, ``None`` if it can.

    Everything is checked before anything changes.
    """
    params, options = join.params, join.params.options
    if join.rank is None or not 0 <= join.rank < params.world_size:
        return rank_out_of_range(state.group, join)
    if not 1 <= options.min_world <= params.world_size:
        return world_out_of_range(
            state.group, join, "min_world", "it must be between 1 and the world_size"
        )
    if options.max_world is not None and options.max_world < params.world_size:
        return world_out_of_range(
            state.group, join, "max_world", "it must not be below the world_size"
        )
    if is_whole(state) and is_known(state, join):
        return group_is_full(state, join)
    forming = state.forming
    if forming is None:
        return None
    if (error := other_release(state.group, forming.seats, join.seat.node)) is not None:
        return error
    if forming.params != join.params:
        return params_mismatch(state.group, forming.opening, forming.params, join)
    holder = forming.seats.get(join.rank)
    return rank_is_taken(state.group, forming.opening, holder.node.node, join) if holder else None


def _with_refusal(state: GroupState, error: AllfoldError) -> GroupState:
    forming = state.forming
    if forming is None or forming.refused == error.message:
        return state
    return replace(state, forming=replace(forming, refused=error.message))


def _take_seat(state: GroupState, join: Join) -> Outcome:
    assert join.rank is not None
    forming = state.forming or Formation(
        _next_opening(state.last_opening, join.generation),
        join.params,
        join.links,
        generation=join.generation,
    )
    forming = replace(
        forming,
        seats=forming.seats.updated({join.rank: join.seat}),
        departed=forming.departed.without((join.rank,)),
        generation=max(forming.generation, join.generation),
    )
    token = join.token if state.forming is None else state.token
    state, completed = _complete_if_possible(replace(state, forming=forming, token=token))
    return state, (Seated(join.rank, forming.opening, ready=bool(completed)), *completed)


def _next_opening(last: int, generation: int) -> int:
    """Return the number of an opening after the last one under a name that the store knows of.

    A store that has lost all knows of none, while a group of that name may still run: its own
    numbers begin above those that earlier generations have given.
    """
    return max(last, (max(generation, 1) - 1) * _OPENINGS_OF_A_GENERATION) + 1


def _complete_if_possible(state: GroupState, generation: int = 0) -> Outcome:
    """Make an opening of a formation that has all its ranks, once the name is free.

    Args:
        generation: of the store now, where it is known; agents that wait for the plan may have
            registered with it already, and do not do so again.
    """
    forming = state.forming
    if forming is None or not forming.full or not state.is_free:
        return state, ()
    forming = replace(forming, generation=max(forming.generation, generation))
    plan = make_plan(state.group, forming)
    completed = replace(
        state,
        last_opening=forming.opening,
        forming=None,
        current=Opening(plan, forming.seats),
        term=replace(first_record(plan), seats=()),
    )
    return completed, (PlanReady(plan),)


def _end_formation_beside(state: GroupState) -> Outcome:
    """End a formation beside a group that runs, as its nodes have just reported.

    Its ranks ask again: they join the group if it takes in others, else they are refused.
    """
    forming = state.forming
    if forming is None or not (takes_in(state) or has_come_back(state)):
        return state, ()
    return _free_seats(state, forming, tuple(sorted(forming.seats)), Reason.WITHDRAWN)


# Leaving


def _leave(state: GroupState, leave: Leave) -> Outcome:
    forming = state.forming
    seat = None if forming is None else _seat_of(forming.seats, leave)
    if forming is not None and seat is not None:
        return _free_seats(state, forming, (seat,), leave.reason)
    if state.term is not None and state.term.opening == leave.ended:
        return _end(state, leave.reason)
    current = state.current
    rank = None if current is None else _rank_of(current, leave)
    if current is not None and rank is not None:
        state, departed = _depart(state, current, (rank,), leave.reason)
        state, completed = _complete_if_possible(state)
        return state, departed + completed
    if (left := without_reported_seat(state, leave.session)) is not state:
        return _complete_if_possible(left)
    if leave.reason is not Reason.FINISHED or _forgotten(state):
        return state, ()
    return _reject(state, not_registered(state.group, leave))


def _end(state: GroupState, reason: Reason) -> Outcome:
    """End a group whose nodes have agreed that no rank is left in it: none of its seats is real.

    Others may have been given seats since, or the store may have lost that ranks have left. Who
    still waits to be let in asks for another seat; until then it would keep the group open.
    """
    state, departed = end_term(state, reason)
    state, completed = _complete_if_possible(state)
    return state, departed + completed


def _forgotten(state: GroupState) -> bool:
    """Return True if the ranks of an earlier opening are not known, or are no longer."""
    known = 0 if state.current is None else state.current.plan.opening
    return known < state.last_opening


def _free_seats(
    state: GroupState, forming: Formation, ranks: tuple[int, ...], reason: Reason
) -> Outcome:
    """Free seats of a formation. Without any seat left the formation ends."""
    seats = forming.seats.without(ranks)
    departed = forming.departed.updated(dict.fromkeys(ranks, reason))
    remaining = replace(forming, seats=seats, departed=departed) if seats else None
    return replace(state, forming=remaining), (SeatsFreed(forming.opening, ranks, reason),)


def _depart(state: GroupState, opening: Opening, ranks: tuple[int, ...], reason: Reason) -> Outcome:
    fresh = tuple(rank for rank in ranks if rank not in opening.departed)
    if not fresh:
        return state, ()
    after = replace(opening, departed=opening.departed.updated(dict.fromkeys(fresh, reason)))
    term = None if after.closed else state.term
    return replace(state, current=after, term=term), (
        RanksDeparted(opening.plan.opening, fresh, reason),
    )


# Nodes


def _nodes_lost(state: GroupState, lost: NodesLost) -> Outcome:
    departed: tuple[Instruction, ...] = ()
    freed: tuple[Instruction, ...] = ()
    state = without_lives(state, lost)
    current, forming = state.current, state.forming
    if current is not None:
        ranks = _ranks_of(current, lost.lives)
        state, departed = _depart(state, current, ranks, Reason.NODE_LOST)
    ranks = _ranks_of(forming, lost.lives) if forming else ()
    if forming is not None and ranks:
        state, freed = _free_seats(state, forming, ranks, Reason.NODE_LOST)
    state, completed = _complete_if_possible(state)
    return state, departed + freed + completed


def _ranks_of(seats: Opening | Formation, lives: Iterable[Life]) -> tuple[int, ...]:
    return tuple(sorted(rank for life in lives for rank in seats.ranks_of(life)))


# Questions about seats


def _rank_of(opening: Opening, leave: Leave) -> int | None:
    """Return the number of the leaving rank's seat; its rank number may have changed since."""
    if opening.params.options.is_elastic or _holds(opening.seats, leave.rank, leave.session):
        return _seat_of(opening.seats, leave)
    return None


def _seat_of(seats: Mapping[int, RankSeat], leave: Leave) -> int | None:
    """Return the number of the leaving rank, which need not know it, as it has named none."""
    if _holds(seats, leave.rank, leave.session):
        return leave.rank
    return next((rank for rank, seat in seats.items() if seat.session == leave.session), None)


def _holds(seats: Mapping[int, RankSeat], rank: int | None, session: str) -> bool:
    seat = None if rank is None else seats.get(rank)
    return seat is not None and seat.session == session


def _still_in(opening: Opening, rank: int | None, session: str) -> bool:
    return rank not in opening.departed and _holds(opening.seats, rank, session)


def _reject(state: GroupState, error: AllfoldError) -> Outcome:
    return state, (Rejected(error),)
