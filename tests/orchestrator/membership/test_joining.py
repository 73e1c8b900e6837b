"""Ranks join a group that runs: whose seats are free, and which nodes get a vote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allfold_core.errors import (
    AllfoldError,
    GroupFull,
    InvalidArgument,
    RegisterParamsMismatch,
    ServiceError,
)
from allfold_core.survival.records import Seat
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    GroupParams,
    GroupState,
    Join,
    Leave,
    PlanReady,
    RanksDeparted,
    Reason,
    Seated,
    SeatsFreed,
)
from allfold_orchestrator.membership.joining import is_unclaimed, running_params, takes_in
from allfold_orchestrator.membership.reports import term_record
from allfold_orchestrator.membership.term_record import (
    Recall,
    Registration,
    StoreLife,
    TermRecord,
)
from tests.orchestrator.builders import GROUP, join, leave, lost, node, play, refused


def elastic(
    rank: int | None,
    on: str = "a",
    *,
    session: str | None = None,
    of: int = 2,
    max_world: int | None = 4,
    generation: int = 0,
) -> Join:
    """A rank of a group that opens with ``of`` ranks."""
    asked = join(rank or 0, on, of=of, session=session, generation=generation)
    return replace(asked, rank=rank, params=replace(asked.params, max_world=max_world))


def running(**options: Any) -> GroupState:
    """A group of s0 on node a and s1 on node b."""
    return play(elastic(rank, "ab"[rank], **options) for rank in (0, 1))[0]


def forgotten(state: GroupState) -> GroupState:
    """The group as agents have reported it to an orchestrator that has lost its state."""
    return GroupState(GROUP, state.last_epoch, state.last_epoch, term=term_record(state))


def seats_of(state: GroupState) -> list[str]:
    return [seat.session for seat in record_of(state).seats]


def record_of(state: GroupState) -> TermRecord:
    record = term_record(state)
    assert record is not None
    return record


def voters_of(state: GroupState) -> tuple[str, ...]:
    assert state.term is not None
    return state.term.term.voters


EITHER = pytest.mark.parametrize("loses", [False, True], ids=["remembered", "forgotten"])


def group(loses: bool, **options: Any) -> GroupState:
    return forgotten(running(**options)) if loses else running(**options)


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


@pytest.mark.parametrize("max_world", [None, 4], ids=["fixed", "elastic"])
@pytest.mark.parametrize("was_joining", [True, False])
def test_a_node_whose_ranks_were_gone_before_they_had_the_plan_has_no_vote(
    was_joining: bool, max_world: int | None
) -> None:
    """It may not know of the group, and the others would wait for its word for ever."""
    gone = replace(leave(0, Reason.LOST), was_joining=was_joining)
    state, _ = play([gone], running(max_world=max_world))
    assert seats_of(state) == ["s1"]
    assert voters_of(state) == (("b",) if was_joining else ("a", "b"))
    assert state.term is not None
    told = (("a", "has lost its ranks before the group opened"),)
    assert state.term.term.lost == (told if was_joining else ())


def test_a_node_with_a_rank_that_is_left_keeps_its_vote() -> None:
    """That one gets the plan."""
    joins = [elastic(rank, "aab"[rank], of=3) for rank in range(3)]
    gone = replace(leave(0, Reason.LOST), was_joining=True)
    state, _ = play([*joins, gone])
    assert voters_of(state) == ("a", "b")
    state, _ = play([replace(gone, rank=1, session="s1")], state)
    assert voters_of(state) == ("b",)


@EITHER
def test_nobody_joins_a_group_of_which_no_node_has_told_since_its_record_was_lost(
    loses: bool,
) -> None:
    """Whatever it asks for: the group may be long over, and its name free soon."""
    before = group(loses)
    later = elastic(None, "c", session="new", max_world=7, generation=5)
    assert "if none does, the group is over" in refused(before, later).message
    assert before.term is not None
    known = replace(before.term, generation=5, recall=Recall(-1.0, frozenset("a")))
    claimed = elastic(None, "c", session="new", generation=5)
    _, (seated,) = play([claimed], replace(before, term=known))
    assert seated == Seated(2, 1, ready=True)
    nobody = replace(before.term, generation=5, recall=Recall(-1.0, frozenset("x")))
    assert "takes in nobody" in refused(replace(before, term=nobody), later).message


def test_ranks_form_another_group_beside_one_of_which_no_node_has_told() -> None:
    before = running(max_world=None)
    newcomer = elastic(0, "c", session="new", max_world=None, of=1)
    assert "registered already" in refused(before, newcomer).message
    later = replace(newcomer, store=StoreLife(5, "0"))
    forming, (seated,) = play([later], before)
    assert seated == Seated(0, 2, ready=False)
    assert forming.forming is not None
    assert forming.forming.full


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
def test_a_rank_that_leaves_a_group_as_it_forms_frees_its_own_seat(
    is_named: bool, leaver: int
) -> None:
    """An agent does not know the number of a rank that has named none, and says 0."""
    names = range(3) if is_named else [None] * 3
    joins = [
        elastic(name, "abc"[each], session=f"s{each}", of=4) for each, name in enumerate(names)
    ]
    forming, _ = play(joins)
    said = Leave(leaver if is_named else 0, f"s{leaver}", Reason.WITHDRAWN)
    state, freed = play([said], forming)
    assert freed == (SeatsFreed(1, (leaver,), Reason.WITHDRAWN),)
    assert state.forming is not None
    left = {rank: seat.session for rank, seat in state.forming.seats.items()}
    assert left == {each: f"s{each}" for each in range(3) if each != leaver}
    assert state.forming.gave_up == [leaver]


def test_who_comes_takes_the_lowest_seat_that_was_left() -> None:
    state, (seated,) = play([leave(0), elastic(None, "b", session="new")], running())
    assert seated == Seated(0, 1, ready=True)
    assert seats_of(state) == ["new", "s1"]


def test_a_rank_leaves_by_its_session_whatever_number_it_has_by_now() -> None:
    state, _ = play(
        [elastic(None, "c", session="new"), leave(0), leave(1, session="new")], running()
    )
    assert seats_of(state) == ["s1"]


def test_a_rank_that_was_lost_comes_back_with_another_session() -> None:
    state, _ = play([leave(1, Reason.LOST), elastic(1, "b", session="again")], running())
    assert seats_of(state) == ["s0", "again"]


def test_a_node_whose_rank_has_joined_is_lost_with_it() -> None:
    state, _ = play([elastic(None, "c", session="new"), lost("c")], running())
    assert voters_of(state) == ("a", "b")
    assert seats_of(state) == ["s0", "s1"]


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


def test_nobody_is_taken_in_while_a_newer_record_may_be_lost() -> None:
    state = forgotten(running())
    assert state.term is not None
    waiting = replace(state, term=replace(state.term, recall=Recall(5.0, frozenset("a"))))
    late = elastic(None, "c", session="new")
    assert type(refused(waiting, late)) is ServiceError
    assert voters_of(play([replace(late, now=5.0)], waiting)[0]) == ("a", "b", "c")


def test_nobody_is_taken_in_by_a_record_of_another_life_of_the_store() -> None:
    state = running(generation=1)
    late = replace(elastic(None, "c", session="new"), store=StoreLife(2, "another"), now=9.0)
    assert type(refused(state, late)) is ServiceError
    unknown = replace(late, store=None)
    assert voters_of(play([unknown], state)[0]) == ("a", "b", "c")


@EITHER
def test_other_parameters_are_refused_but_for_the_size_of_the_opening(loses: bool) -> None:
    late = elastic(None, "c", session="new", of=1)
    assert play([late], group(loses))[1] == (Seated(2, 1, ready=True),)
    other = replace(late, params=replace(late.params, on_loss="shrink"))
    assert isinstance(refused(group(loses), other), RegisterParamsMismatch)


def test_a_group_without_max_world_takes_in_nobody() -> None:
    state, _ = play(join(rank) for rank in (0, 1))
    assert not takes_in(state)
    assert running_params(state) is not None
    assert running_params(GroupState(GROUP)) is None
    assert state.term is not None
    unknown = replace(forgotten(state), term=replace(state.term, plan=None))
    assert running_params(unknown) is None
    assert not takes_in(unknown)


# The opening


def test_ranks_without_a_number_get_one_each_and_keep_it_when_they_ask_again() -> None:
    first = elastic(None, session="x")
    state, answer = play([first])
    assert answer == (Seated(0, 1, ready=False),)
    assert play([first], state)[1] == answer
    state, answer = play([elastic(None, session="y")], state)
    assert answer[0] == Seated(1, 1, ready=True)
    assert isinstance(answer[1], PlanReady)
    assert answer[1].plan.max_world == 4


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
    assert isinstance(GroupParams(2, 1.0).is_elastic, bool)
    assert Seat("s0", "a") not in (state.term.seats if state.term else ())


ENDED = Leave(0, "new", Reason.WITHDRAWN, ended=1)


@EITHER
def test_a_group_that_its_nodes_say_all_have_left_is_over_with_the_seats_given_since(
    loses: bool,
) -> None:
    late = [elastic(None, name, session=f"late {name}") for name in "cd"]
    ghost, _ = play(late, group(loses))
    assert takes_in(ghost)
    over, _ = play([ENDED], ghost)
    assert over.is_free
    again, (seated, *_) = play([late[0]], over)
    assert seated == Seated(0, 2, ready=False), "an opening of its own"
    report = Registration(("b", "1"), 1, record_of(ghost))
    after, said = play([AgentRegisters(report, StoreLife(1, "0"), 9.0)], again)
    assert (after, said) == (again, (AgentRegistered(is_out=True),)), "nor is it brought back"


def test_a_group_that_all_have_left_makes_room_for_the_one_that_waits() -> None:
    first = running(max_world=None)
    waiting = [join(rank, "cd"[rank], session=f"next {rank}") for rank in (0, 1)]
    state, _ = play([leave(1), *waiting], first)
    assert state.forming is not None
    state, (departed, ready) = play([replace(ENDED, session="s0")], state)
    assert departed == RanksDeparted(1, (0,), Reason.WITHDRAWN)
    assert isinstance(ready, PlanReady)


@EITHER
def test_news_of_the_end_of_an_earlier_opening_ends_no_later_one(loses: bool) -> None:
    state = group(loses)
    assert play([replace(ENDED, ended=2)], state) == (state, ())


# Ranks that end on their way, and records that are behind


def test_a_node_whose_only_rank_gives_up_on_its_way_has_no_vote_any_more() -> None:
    joined, _ = play([elastic(None, "c", session="new")], running(generation=1))
    state, _ = play([leave(0, Reason.LOST, session="new")], joined)
    assert voters_of(state) == ("a", "b")
    assert state.term is not None
    assert joined.term is not None
    assert state.term.term.may_follow(joined.term.term)
    assert seats_of(state) == ["s0", "s1"]


@pytest.mark.parametrize(
    ("gone", "reason"), [("s1", Reason.LOST), ("new", Reason.FINISHED)], ids=["opened", "finished"]
)
def test_the_node_of_a_rank_that_may_owe_others_results_keeps_its_vote(
    gone: str, reason: Reason
) -> None:
    joined, _ = play([elastic(None, "c", session="new")], running())
    state, _ = play([leave(1, reason, session=gone)], joined)
    assert voters_of(state) == ("a", "b", "c")


def test_a_node_keeps_its_vote_while_it_has_another_rank_or_the_record_is_not_trusted() -> None:
    joined, _ = play([elastic(None, "c", session=each) for each in ("x", "y")], running())
    assert voters_of(play([leave(0, Reason.LOST, session="x")], joined)[0]) == ("a", "b", "c")
    old = replace(leave(0, Reason.LOST, session="new"), store=StoreLife(2, "another"))
    alone, _ = play([elastic(None, "c", session="new")], running(generation=1))
    assert voters_of(play([old], alone)[0]) == ("a", "b", "c")


STORE = StoreLife(2, "another")


def registers(state: GroupState, on: str, held: TermRecord) -> GroupState:
    """The group after a node has registered with a store that may have lost something."""
    report = Registration((on, "1"), 1, held)
    return play([AgentRegisters(report, STORE, 9.0)], state)[0]


@pytest.mark.parametrize("on", ["b", "c"])
def test_a_record_that_has_come_back_gets_the_ranks_that_had_joined_since(on: str) -> None:
    before = running(generation=1)
    held = record_of(play([elastic(None, on, session="new")], before)[0])
    state = registers(registers(before, on, held), "a", record_of(before))
    assert sorted(seats_of(state)) == ["new", "s0", "s1"]


def test_a_record_that_has_come_back_loses_the_ranks_that_had_left_since() -> None:
    before, _ = play([elastic(None, "b", session="new")], running(generation=1))
    held = record_of(play([leave(1)], before)[0])
    assert seats_of(registers(before, "b", held)) == ["s0", "new"]
    assert seats_of(registers(before, "a", held)) == ["s0", "s1", "new"]


def test_what_a_node_has_said_of_its_ranks_counts_for_more_than_what_others_know() -> None:
    before = running(generation=1)
    known = record_of(play([elastic(None, "b", session="new")], before)[0])
    newer = record_of(play([elastic(None, "c", session="more")], before)[0])
    state = registers(registers(GroupState(GROUP), "b", known), "c", newer)
    assert voters_of(state) == ("a", "b", "c")
    assert sorted(seats_of(state)) == ["more", "new", "s0", "s1"]


def test_ranks_that_were_to_open_a_group_join_it_when_its_nodes_report_that_it_runs() -> None:
    late = elastic(None, "c", session="new", generation=2)
    state, (seated,) = play([late])
    assert seated == Seated(0, 1, ready=False)
    held = record_of(running(generation=1))
    state = registers(registers(state, "a", held), "b", held)
    assert state.forming is None
    assert play([late], state)[1] == (Seated(2, 1, ready=True),)


def test_a_group_without_a_record_is_not_one_that_its_nodes_do_not_claim() -> None:
    assert not is_unclaimed(GroupState(GROUP), elastic(0))
