"""Ranks leave a group that runs: which nodes keep a vote, and when the group is over."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import pytest

from allfold_orchestrator.membership import reports
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    Leave,
    PlanReady,
    RanksDeparted,
    Reason,
    Seated,
    SeatsFreed,
    StoreLife,
)
from allfold_orchestrator.membership.joining import takes_in
from allfold_orchestrator.membership.membership import step
from tests.orchestrator.builders import join, leave, lost, play, ready
from tests.orchestrator.membership.running_groups import (
    EITHER,
    elastic,
    group,
    record_of,
    running,
    seats_of,
    voters_of,
)

ENDED = Leave(0, "new", Reason.WITHDRAWN, ended=1)


@pytest.mark.parametrize("max_world", [None, 4], ids=["fixed", "elastic"])
@pytest.mark.parametrize("was_joining", [True, False])
def test_a_node_whose_ranks_were_gone_before_they_had_the_plan_has_no_vote(
    was_joining: bool, max_world: int | None
) -> None:
    """The node may not know of the group, so the others would never get its report."""
    gone = replace(leave(0, Reason.LOST), was_joining=was_joining)
    state, _ = play([gone], running(max_world=max_world))
    assert seats_of(state) == ["s1"]
    assert voters_of(state) == (("b",) if was_joining else ("a", "b"))
    assert state.term is not None
    told = (("a", "has lost its ranks before the group opened"),)
    assert state.term.term.lost == (told if was_joining else ())


def test_a_node_with_a_rank_that_is_left_keeps_its_vote() -> None:
    """The rank that is left gets the plan."""
    joins = [elastic(rank, "aab"[rank], of=3) for rank in range(3)]
    gone = replace(leave(0, Reason.LOST), was_joining=True)
    state, _ = play([*joins, gone])
    assert voters_of(state) == ("a", "b")
    state, _ = play([replace(gone, rank=1, session="s1")], state)
    assert voters_of(state) == ("b",)


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


def test_a_rank_leaves_by_its_session_whatever_number_it_has_by_now() -> None:
    state, _ = play(
        [elastic(None, "c", session="new"), leave(0), leave(1, session="new")], running()
    )
    assert seats_of(state) == ["s1"]


def test_a_node_whose_rank_has_joined_is_lost_with_it() -> None:
    state, _ = play([elastic(None, "c", session="new"), lost("c")], running())
    assert voters_of(state) == ("a", "b")
    assert seats_of(state) == ["s0", "s1"]


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
    report = AgentRegisters(("b", "1"), 1, record_of(ghost), StoreLife(1, "0"), 9.0)
    after, said = play([report], again)
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


def test_the_record_with_all_seats_is_not_made_for_each_rank_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of thousands of ranks would take hours to end."""
    state, ranks = ready(20), range(20)
    monkeypatch.setattr(reports, "seats_of", never)
    for rank in ranks:
        state, _ = step(state, leave(rank))
    assert state.is_free


def never(_: object) -> NoReturn:
    raise AssertionError("made for one rank among many")
