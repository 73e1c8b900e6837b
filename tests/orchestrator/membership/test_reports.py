"""Terms in the state of a group: made with an opening, followed by losses, rebuilt from reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.survival.records import Seat
from allfold_core.survival.term_record import TermRecord
from allfold_orchestrator.membership.group_state import (
    AgentRegistered,
    AgentRegisters,
    GroupState,
    LossShown,
    NodeHolds,
    PlanReady,
    RanksDeparted,
    Reason,
    StoreLife,
)
from allfold_orchestrator.membership.membership import step
from allfold_orchestrator.membership.reports import term_record
from tests.orchestrator.builders import GROUP, join, leave, lost, play, ready

EMPTY = GroupState(GROUP)
STORE = StoreLife(0, "first")
LATER = StoreLife(2, "second")
UNTIL = 100.0


def record_of(state: GroupState) -> TermRecord:
    record = term_record(state)
    assert record is not None
    return record


def registers(
    name: str, held: TermRecord, *, store: StoreLife = LATER, generation: int = 0, out: bool = False
) -> AgentRegisters:
    return AgentRegisters((name, "1"), generation, held, store, UNTIL, is_out=out)


def test_an_opening_begins_with_a_term_of_all_its_nodes_and_of_the_stores_generation() -> None:
    joins = [join(rank, "ab"[rank], generation=3) for rank in (0, 1)]
    state, _ = play(joins)
    record = record_of(state)
    assert state.current is not None
    assert state.current.plan.generation == 3
    assert (record.opening, record.term.number, record.term.generation) == (2049, 2049, 3)
    assert record.term.voters == ("a", "b")
    assert record.seats == (Seat("s0", "a"), Seat("s1", "b"))


def test_a_group_that_opens_after_its_agents_registered_anew_is_of_that_generation() -> None:
    """Its formation was opened before, and nobody registers once more."""
    state, _ = play([join(0, "a", generation=1), join(1, "b", generation=2)])
    assert (record_of(state).generation, record_of(state).recall) == (2, None)
    again = play([registers("a", record_of(state), generation=2)], state)[0]
    assert record_of(again).recall is None


def test_a_formation_that_a_report_completes_is_of_the_generation_of_that_report() -> None:
    waiting = join(0, "b", of=1, session="next", generation=1)
    full, _ = play([leave(0), waiting], ready(2))
    state, _ = play([registers("b", record_of(full), out=True)], full)
    assert (record_of(state).opening, record_of(state).generation) == (2, LATER.generation)


def test_ranks_that_leave_are_not_in_the_record_and_the_last_one_ends_the_term() -> None:
    state, _ = play([leave(0)], ready(2))
    assert record_of(state).seats == (Seat("s1", "b"),)
    assert record_of(state).term.voters == ("a", "b")
    state, _ = play([leave(1)], state)
    assert state.term is None


def test_a_lost_node_is_left_out_by_the_next_term() -> None:
    state, _ = play([lost("b")], ready(3))
    term = record_of(state).term
    assert (term.number, term.voters, term.lost) == (2, ("a", "c"), (("b", "it was refused"),))
    again, _ = play([lost("b")], state)
    assert again.term is state.term
    over, _ = play([lost("a"), lost("c")], state)
    assert over.term is None
    assert over.is_free


def test_nodes_that_are_lost_together_are_left_out_by_one_term() -> None:
    state, instructions = play([lost("b", "c")], ready(4))
    term = record_of(state).term
    assert (term.number, term.voters) == (2, ("a", "d"))
    assert [name for name, _ in term.lost] == ["b", "c"]
    assert instructions == (RanksDeparted(1, (1, 2), Reason.NODE_LOST),)


def test_an_agent_that_registers_with_what_the_record_has_changes_nothing() -> None:
    state = ready(2)
    event = registers("a", record_of(state), store=STORE)
    assert step(state, event) == (state, (AgentRegistered(is_out=False),))


def test_an_agent_that_knows_a_later_term_shows_that_the_store_lost_one() -> None:
    state = ready(3)
    later = record_of(play([lost("b")], state)[0])
    event = registers("a", later, store=STORE)
    assert step(state, event) == (state, (LossShown(0),))
    event = registers("a", later, store=STORE, generation=7)
    assert step(EMPTY, event) == (EMPTY, (LossShown(7),))


def test_a_group_that_was_forgotten_is_known_again_from_one_report() -> None:
    held = record_of(ready(2))
    state, instructions = play([NodeHolds("a", 1), registers("a", held)], EMPTY)
    assert instructions == (AgentRegistered(is_out=False),)
    assert record_of(state).seats == held.seats
    assert state.last_opening == 1
    assert not state.is_free
    state, _ = play([registers("b", held)], state)
    assert record_of(state).recall is None


def test_a_name_that_is_known_from_reports_is_free_when_the_last_reported_rank_has_left() -> None:
    held = record_of(ready(2))
    state, _ = play([registers("a", held), join(0, "c", of=1, session="new")], EMPTY)
    assert state.forming is not None
    state, _ = play([leave(0)], state)
    assert not state.is_free
    unknown, _ = step(state, leave(0, Reason.LOST, session="stranger"))
    assert unknown is state
    state, instructions = play([leave(1)], state)
    assert isinstance(instructions[-1], PlanReady)
    assert instructions[-1].plan.opening == 2


def test_a_name_that_is_known_from_reports_is_free_when_its_last_node_is_lost() -> None:
    held = record_of(ready(2))
    state, _ = play([registers("a", held), lost("a")], EMPTY)
    assert record_of(state).term.voters == ("b",)
    state, _ = play([lost("b")], state)
    assert state.is_free
    _, instructions = play([registers("b", held)], state)
    assert instructions == (AgentRegistered(is_out=True),), "a late report"


def test_a_name_that_is_known_from_reports_stays_free_when_its_last_rank_has_left() -> None:
    held = record_of(ready(2))
    state, _ = play([registers("a", held), leave(0), leave(1)], EMPTY)
    assert state.is_free
    _, instructions = step(state, registers("b", held, generation=LATER.generation))
    assert instructions == (AgentRegistered(is_out=True),), "a late report"
    assert step(state, leave(1)) == (state, ()), "the first answer was lost"


def test_an_agent_that_read_the_store_before_its_last_loss_registers_with_what_is_now() -> None:
    state, _ = play([registers("a", record_of(ready(3)), store=StoreLife(3, "third"))], EMPTY)
    late = registers("b", record_of(ready(3)), generation=1)
    assert step(state, late) == (state, (LossShown(1),))


@pytest.mark.parametrize("later_opening", [False, True])
def test_an_agent_that_still_holds_an_opening_that_is_over_is_out(later_opening: bool) -> None:
    held = record_of(ready(2))
    state, _ = play([leave(0), leave(1)], ready(2))
    if later_opening:
        state, _ = play([NodeHolds("c", 5)], state)
    assert step(state, registers("a", held, store=STORE)) == (
        state,
        (AgentRegistered(is_out=True),),
    )


def test_ranks_of_nodes_that_no_reported_term_has_are_lost() -> None:
    """The store has an old state; one agent knows a term that leaves out another."""
    state = ready(3)
    later = record_of(play([lost("b")], state)[0])
    after, instructions = play([registers("a", later)], state)
    assert instructions == (
        RanksDeparted(1, (1,), Reason.NODE_LOST),
        AgentRegistered(is_out=False),
    )
    assert record_of(after).term == later.term
    after, instructions = play([registers("b", record_of(state))], after)
    assert instructions == (AgentRegistered(is_out=True),)


def test_a_node_that_says_it_is_out_loses_its_ranks_and_the_last_one_frees_the_name() -> None:
    state, _ = play(
        [leave(1), join(1, "c", of=2, session="x"), join(0, "c", of=2, session="y")], ready(2)
    )
    held = record_of(state)
    after, instructions = play([registers("a", held, store=STORE, out=True)], state)
    assert instructions[0] == RanksDeparted(1, (0,), Reason.NODE_LOST)
    assert isinstance(instructions[-1], PlanReady)
    assert record_of(after).opening == 2


def test_a_later_opening_that_only_agents_know_takes_the_place_of_the_one_in_the_store() -> None:
    state = ready(2)
    later = replace(record_of(state), opening=4)
    after, _ = play([registers("a", later)], state)
    assert after.current is None
    assert record_of(after).opening == 4
    assert after.last_opening == 4


def test_a_formation_under_way_gets_a_number_above_what_agents_report() -> None:
    held = replace(record_of(ready(2)), opening=4)
    state, _ = play([join(0, "c"), registers("a", held)], EMPTY)
    assert state.forming is not None
    assert state.forming.opening == 5


def test_a_name_is_free_when_all_nodes_have_registered_and_none_has_a_rank_any_more() -> None:
    record = record_of(ready(2))
    a, b = (replace(record, seats=tuple(s for s in record.seats if s.node != n)) for n in "ab")
    state, _ = play([registers("a", a)], EMPTY)
    waiting, _ = play([join(0, "c", of=1, session="next")], state)
    over, told = play([registers("b", b)], waiting)
    assert AgentRegistered(is_out=False) in told
    assert any(isinstance(each, PlanReady) for each in told), "who waited for the name has it"
    late, told = play([registers("a", a)], over)
    assert late == over
