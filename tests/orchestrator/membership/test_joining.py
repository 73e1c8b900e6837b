"""Ranks join a group that runs: whose seats are free, and which nodes get a vote."""

from __future__ import annotations

from dataclasses import replace

from allfold_core.errors import (
    AllfoldError,
    GroupFull,
    InvalidArgument,
    RegisterParamsMismatch,
    ServiceError,
)
from allfold_core.survival.records import Seat
from allfold_orchestrator.membership.group_state import (
    GroupState,
    PlanReady,
    Reason,
    Seated,
)
from allfold_orchestrator.membership.joining import running_params, takes_in
from tests.orchestrator.builders import GROUP, join, leave, lost, node, play, refused, with_options
from tests.orchestrator.membership.running_groups import (
    EITHER,
    elastic,
    forgotten,
    group,
    running,
    seats_of,
)


@EITHER
def test_a_rank_on_a_node_of_the_group_needs_no_new_term(loses: bool) -> None:
    before = group(loses)
    state, (seated,) = play([elastic(None, "b", session="new")], before)
    assert seated == Seated(2, 1, ready=True)
    assert seats_of(state) == ["s0", "s1", "new"]
    assert before.term is not None
    assert state.term is not None
    assert state.term.term is before.term.term


@EITHER
def test_the_node_of_a_rank_votes_from_the_next_term_on(loses: bool) -> None:
    before = group(loses)
    state, _ = play([elastic(None, "c", session="new")], before)
    assert state.term is not None
    term = state.term.term
    assert (term.number, term.voters, term.joined) == (2, ("a", "b", "c"), (1, 1, 2))
    assert [(each.node, each.data_address) for each in term.newcomers] == [("c", "c:7402")]
    assert state.term.has(("c", "1"))
    assert before.term is not None
    assert term.may_follow(before.term.term)


@EITHER
def test_a_join_that_is_repeated_has_the_same_answer(loses: bool) -> None:
    asked = elastic(None, "c", session="new")
    state, first = play([asked], group(loses))
    assert play([asked], state) == (state, first)


@EITHER
def test_a_group_that_is_full_takes_in_a_rank_when_another_has_left(loses: bool) -> None:
    full = group(loses, max_world=2)
    late = elastic(None, "c", session="new", max_world=2)
    error = refused(full, late)
    assert isinstance(error, GroupFull)
    assert error.details["max_world"] == 2
    state, _ = play([leave(0), late], full)
    assert sorted(seats_of(state)) == ["new", "s1"]


def test_who_comes_takes_the_lowest_seat_that_was_left() -> None:
    state, (seated,) = play([leave(0), elastic(None, "b", session="new")], running())
    assert seated == Seated(0, 1, ready=True)
    assert seats_of(state) == ["new", "s1"]


def test_a_rank_that_was_lost_comes_back_with_another_session() -> None:
    state, _ = play([leave(1, Reason.LOST), elastic(1, "b", session="again")], running())
    assert seats_of(state) == ["s0", "again"]


@EITHER
def test_another_life_of_a_node_joins_when_the_earlier_one_is_out(loses: bool) -> None:
    again = replace(elastic(None, "b", session="again"))
    again = replace(again, seat=replace(again.seat, node=node("b", "2")))
    error = refused(group(loses), again)
    assert type(error) is ServiceError
    assert error.details["node"] == "b"
    state, _ = play([lost("b"), again], group(loses))
    assert state.term is not None
    assert state.term.term.joined == (1, 3)
    assert seats_of(state) == ["s0", "again"]


@EITHER
def test_other_parameters_are_refused_but_for_the_size_of_the_opening(loses: bool) -> None:
    late = elastic(None, "c", session="new", of=1)
    assert play([late], group(loses))[1] == (Seated(2, 1, ready=True),)
    other = with_options(late, on_loss="shrink")
    assert isinstance(refused(group(loses), other), RegisterParamsMismatch)


def test_an_agent_of_another_series_does_not_come_into_a_group_that_runs() -> None:
    old = [elastic(rank, node(name, version="0.2.3")) for rank, name in enumerate("ab")]
    state, _ = play(old)
    late = elastic(None, node("c", version="0.3.0"), session="new")
    error = refused(state, late)
    assert isinstance(error, RegisterParamsMismatch)
    assert "node c is Allfold 0.3.0" in error.message
    patched = elastic(None, node("c", version="0.2.4"), session="new")
    assert isinstance(play([patched], state)[1][0], Seated)


def test_a_group_without_max_world_takes_in_nobody() -> None:
    state, _ = play(join(rank) for rank in (0, 1))
    assert not takes_in(state)
    assert running_params(state) is not None
    assert running_params(GroupState(GROUP)) is None
    assert state.term is not None
    unknown = replace(forgotten(state), term=replace(state.term, plan=None))
    assert running_params(unknown) is None
    assert not takes_in(unknown)


def test_ranks_without_a_number_get_one_each_and_keep_it_when_they_ask_again() -> None:
    first = elastic(None, session="x")
    state, answer = play([first])
    assert answer == (Seated(0, 1, ready=False),)
    assert play([first], state)[1] == answer
    state, answer = play([elastic(None, session="y")], state)
    assert answer[0] == Seated(1, 1, ready=True)
    assert isinstance(answer[1], PlanReady)
    assert answer[1].plan.options.max_world == 4


def test_one_without_a_number_too_many_is_refused() -> None:
    state, _ = play([elastic(0), elastic(None, session="y", of=2)])
    assert isinstance(refused(GroupState(GROUP), elastic(2)), AllfoldError)
    assert takes_in(state)


def test_max_world_must_not_be_below_the_size_of_the_opening() -> None:
    error = refused(GroupState(GROUP), elastic(0, max_world=1))
    assert isinstance(error, InvalidArgument)
    assert error.details["field"] == "max_world"


def test_a_group_of_which_nothing_is_left_has_no_parameters() -> None:
    state, _ = play([leave(0), leave(1)], running())
    assert not takes_in(state)
    assert Seat("s0", "a") not in (state.term.seats if state.term else ())
