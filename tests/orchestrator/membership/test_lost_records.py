"""Ranks join a group whose record the store has lost, in part or completely."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.errors import MultipleRegister, RegisterParamsMismatch, ServiceError
from allfold_core.survival.term_record import Recall, TermRecord
from allfold_orchestrator.membership.group_state import (
    AgentRegisters,
    GroupState,
    Join,
    Seated,
    StoreLife,
)
from allfold_orchestrator.membership.joining import is_unclaimed
from tests.orchestrator.builders import GROUP, leave, play, refused, with_options
from tests.orchestrator.membership.running_groups import (
    EITHER,
    elastic,
    forgotten,
    group,
    record_of,
    running,
    seats_of,
    voters_of,
)

STORE = StoreLife(2, "another")
# The numbers of the first openings in these generations of a store.
FIRST_OF_2, FIRST_OF_5 = 1025, 4097


def registers(state: GroupState, on: str, held: TermRecord) -> GroupState:
    """The group after a node has registered with a store that may have lost something."""
    return play([AgentRegisters((on, "1"), 1, held, STORE, 9.0)], state)[0]


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
    assert seated == Seated(0, FIRST_OF_5, ready=False)
    assert forming.forming is not None
    assert forming.forming.full


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
    assert seated == Seated(0, FIRST_OF_2, ready=False)
    held = record_of(running(generation=1))
    state = registers(registers(state, "a", held), "b", held)
    assert state.forming is None
    assert play([late], state)[1] == (Seated(2, 1, ready=True),)


def test_a_group_without_a_record_is_not_one_that_its_nodes_do_not_claim() -> None:
    assert not is_unclaimed(GroupState(GROUP), elastic(0))


# Groups that take in nobody


def fixed(rank: int, on: str = "c", *, of: int = 2, generation: int = 2) -> Join:
    """A rank of a second job under the name of a group of s0 on node a and s1 on node b."""
    asked = elastic(rank, on, session=f"new{rank}", max_world=None, of=of, generation=generation)
    return replace(asked, store=STORE)


def reported(by: str, before: GroupState) -> GroupState:
    """The group after these nodes have told of it an orchestrator that had lost its record."""
    state, held = GroupState(GROUP), record_of(before)
    for name in by:
        state = registers(state, name, held)
    return state


@EITHER
def test_a_second_job_under_the_name_of_a_group_that_runs_is_told_so_at_once(loses: bool) -> None:
    before = running(max_world=None, generation=1)
    state = reported("ab", before) if loses else before
    error = refused(state, replace(fixed(1), store=None) if not loses else fixed(1))
    assert type(error) is MultipleRegister
    assert (error.details["holder"], error.details["requester"]) == ("b", "c")
    assert "the group runs, with 2 ranks on nodes a, b" in error.message
    assert "another job another group (init(group=) or ALLFOLD_GROUP)" in error.message


def test_ranks_that_came_before_the_nodes_told_of_their_group_ask_again_and_are_refused() -> None:
    state, (seated,) = play([fixed(0)])
    assert seated == Seated(0, FIRST_OF_2, ready=False)
    held = record_of(running(max_world=None, generation=1))
    state = registers(state, "a", held)
    assert state.forming is not None, "a rank of node b may have left, which only b knows"
    state = registers(state, "b", held)
    assert state.forming is None
    assert type(refused(state, fixed(0))) is MultipleRegister


def test_a_job_that_is_started_anew_waits_for_the_ranks_of_a_group_that_others_have_left() -> None:
    before = running(max_world=None, generation=1)
    left = play([leave(0)], before)[0]
    state = registers(registers(GroupState(GROUP), "b", record_of(before)), "a", record_of(left))
    state, (seated,) = play([fixed(0)], state)
    assert seated == Seated(0, FIRST_OF_2, ready=False)


@EITHER
def test_a_rank_without_the_key_of_a_group_that_runs_learns_nothing_of_it(loses: bool) -> None:
    joins = [elastic(rank, "ab"[rank], max_world=None, generation=1) for rank in (0, 1)]
    before = play(with_options(each, key="a") for each in joins)[0]
    state = reported("ab", before) if loses else before
    error = refused(state, replace(fixed(0), store=None if not loses else STORE))
    assert type(error) is RegisterParamsMismatch
    assert error.details["differing"] == ["key"]
    assert "node a" not in error.message
