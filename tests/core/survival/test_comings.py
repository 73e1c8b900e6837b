"""Errors that the search found in joins of nodes and ranks, each as a short example."""

from __future__ import annotations

from dataclasses import replace

from allfold_core.operations import Kind
from allfold_core.survival.admission import (
    announce,
    is_due,
    waiting_sessions,
    with_others_awaited,
)
from allfold_core.survival.agent_machine import AgentMachine
from allfold_core.survival.decision import decide
from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Evicted,
    HandOut,
    LeaveBoundary,
    Release,
    SendDoubt,
    SendReport,
    SendWishes,
)
from allfold_core.survival.records import NO_EPOCH, Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Reason,
    Report,
    Run,
    Wishes,
)
from tests.core.survival.calls import call_of
from tests.support.policies import changed, policy_with

SEATS = (Seat("r0", "a"), Seat("r1", "b", 1))
FIRST = Epoch(Stamp(1, 0, 0), 0, SEATS, seated=2)
TERM = Term(1, 0, ("a", "b"), (1, 1))
POLICY = policy_with(on_loss="shrink", max_world=4, joins="commit")


def install(machine: AgentMachine, number: int, epoch: Epoch) -> list[object]:
    machine.freeze(1, number)
    return [*machine.install(Install(1, number, epoch, (), -1, {}))]


def test_ranks_at_a_boundary_go_on_though_their_node_hears_of_its_end_with_the_next_one() -> None:
    machine = AgentMachine("a", POLICY, TERM, FIRST)
    first_boundary = replace(FIRST, stamp=Stamp(1, 1, 0), waiting=("r2",), boundaries=1)
    install(machine, 1, first_boundary)
    machine.at_boundary("r0", 4, boundary=1)
    next_boundary = replace(first_boundary, stamp=Stamp(1, 3, 0), waiting=("r3",), boundaries=2)
    assert LeaveBoundary(("r0",)) in install(machine, 3, next_boundary)


def test_ranks_at_a_boundary_stay_while_it_is_the_same_one() -> None:
    machine = AgentMachine("a", POLICY, TERM, FIRST)
    boundary = replace(FIRST, stamp=Stamp(1, 1, 0), waiting=("r2",), boundaries=1)
    install(machine, 1, boundary)
    machine.at_boundary("r0", 4, boundary=1)
    later = replace(boundary, stamp=Stamp(1, 2, 0), waiting=("r2", "r3"))
    assert not any(isinstance(each, LeaveBoundary) for each in install(machine, 2, later))


def test_a_node_that_was_left_out_and_has_joined_anew_is_out_as_it_was_before() -> None:
    machine = AgentMachine("b", POLICY, TERM, FIRST)
    anew = Term(3, 0, ("a", "b"), (1, 3))
    assert machine.take_term(anew, 0) == [Evicted(anew)]


def test_a_node_that_has_joined_anew_is_no_member_of_epochs_from_before() -> None:
    anew = Term(3, 0, ("a", "b"), (1, 3))
    assert anew.members_of(FIRST) == {"a"}
    assert anew.members_of(replace(FIRST, stamp=Stamp(3, 0, 0))) == {"a", "b"}


def test_a_rank_that_wants_to_leave_a_group_that_is_too_small_costs_one_round() -> None:
    small, wishes = changed(POLICY, min_world=3), {"a": Wishes(leave=("r0",))}
    waiting = with_others_awaited(small, FIRST)
    assert is_due(small, TERM, waiting, wishes)
    announced = announce(waiting, waiting_sessions(small, TERM, waiting, wishes))
    assert not is_due(small, TERM, announced, wishes)


def test_too_few_ranks_wait_in_their_ops_where_others_come_in_anywhere() -> None:
    small = changed(POLICY, min_world=3, joins="any")
    machine = AgentMachine("a", small, TERM, FIRST)
    assert machine.call(4, "r0", call_of(Kind.ALL_REDUCE)) == []
    (told,) = machine.freeze(1, 1)
    assert isinstance(told, SendReport)
    other = Report("b", TERM, 1, FIRST, (), {}, -1, {}, {})
    reports = {"a": told.report, "b": other}
    assert decide(small, TERM, 1, reports, {}, lambda *_: None).outcomes == {}


def test_too_few_ranks_call_nothing_where_others_come_in_at_boundaries() -> None:
    """They are told so by the failure of what they have called already."""
    small = changed(POLICY, min_world=3)
    machine = AgentMachine("a", small, TERM, FIRST)
    assert machine.call(4, "r0", call_of(Kind.ALL_REDUCE)) == [SendDoubt(Doubt(4, Reason.STALE))]
    (told,) = machine.freeze(1, 1)
    assert isinstance(told, SendReport)
    reports = {"a": told.report, "b": Report("b", TERM, 1, FIRST, (), {}, -1, {}, {})}
    install = decide(small, TERM, 1, reports, {}, lambda *_: None)
    failed = install.outcomes[4]
    assert isinstance(failed, Fail)
    assert "2 ranks are left and min_world is 3" in failed.error


def test_a_rank_that_others_await_in_an_op_from_before_a_boundary_does_not_stop_there() -> None:
    machine, since = AgentMachine("a", POLICY, TERM, FIRST), replace(FIRST, ordinal=1, boundaries=1)
    alone = replace(since, stamp=Stamp(1, 1, 0), waiting=("r2",))
    machine.freeze(1, 1)
    machine.install(Install(1, 1, alone, (FIRST,), -1, {4: Run(FIRST.stamp), 5: Run(FIRST.stamp)}))
    assert machine.at_boundary("r0", 4, boundary=1) == [LeaveBoundary(("r0",))]
    machine.call(4, "r0", call_of(Kind.ALL_REDUCE))
    assert machine.at_boundary("r0", 6, boundary=1) == [SendWishes(Wishes(at_boundary={"r0": 6}))]


def test_a_rank_that_waits_at_a_boundary_goes_on_once_others_await_it_in_an_earlier_op() -> None:
    machine = AgentMachine("a", POLICY, TERM, FIRST)
    boundary = replace(FIRST, waiting=("r2",), boundaries=1)
    before = replace(boundary, stamp=Stamp(1, 1, 0))
    install(machine, 1, before)
    machine.at_boundary("r0", 4, boundary=1)
    machine.freeze(1, 2)
    lost = replace(boundary, stamp=Stamp(1, 2, 0), ordinal=1)
    done = machine.install(Install(1, 2, lost, (before,), -1, {4: Run(before.stamp)}))
    assert done[-2:] == [LeaveBoundary(("r0",)), SendWishes(Wishes())]


def test_a_node_whose_ranks_are_all_new_begins_behind_what_the_old_ones_have_left_open() -> None:
    machine = AgentMachine("b", POLICY, TERM, FIRST)
    joined = Epoch(Stamp(1, 1, 0), 1, (SEATS[0], Seat("r2", "b", 2, 7)), seated=3)
    machine.freeze(1, 1)
    machine.install(Install(1, 1, joined, (), 3, {}))
    assert (machine.watermark, machine.floor) == (6, 3)
    machine.call(7, "r2", call_of(Kind.ALL_REDUCE))
    assert machine.completed(7, joined.stamp) == [HandOut(7, joined.stamp)]
    assert machine.watermark == 7


def test_an_attempt_of_dead_ranks_ends_once_its_op_is_final_on_all_others() -> None:
    machine = AgentMachine("b", POLICY, TERM, FIRST)
    machine.call(0, "r1", call_of(Kind.ALL_REDUCE))
    machine.rank_ended("r1", "died")
    machine.freeze(1, 1)
    assert machine.learn_floor(0) == [], "it is frozen"
    assert machine.install(Install(1, 1, FIRST, (), 0, {}))[:2] == [Cancel(0), Drop(0)]
    assert machine.watermark == 0


def test_a_call_of_a_dead_rank_without_which_its_op_ended_is_forgotten() -> None:
    two = replace(FIRST, seats=(*SEATS, Seat("r3", "b", 2)))
    machine = AgentMachine("b", POLICY, TERM, two)
    machine.call(0, "r1", call_of(Kind.ALL_REDUCE))
    for session in ("r1", "r3"):
        machine.rank_ended(session, "died")
    assert machine.learn_floor(0) == [Drop(0), Release(0)]


def test_a_node_that_has_come_back_awaits_nothing_that_it_began_in_its_former_life() -> None:
    anew = Term(3, 0, ("a", "b"), (1, 3))
    machine = AgentMachine("b", POLICY, anew, NO_EPOCH)
    machine.begin()
    now = Epoch(Stamp(3, 0, 0), 1, (SEATS[0], Seat("r2", "b", 2, 5)), seated=3)
    machine.install(Install(3, 0, now, (FIRST,), 3, {4: Forward(FIRST.stamp, ("a",))}))
    assert not machine.ops
    assert machine.watermark == 4


def test_the_number_of_an_op_that_only_dead_nodes_had_begun_is_not_used_for_another() -> None:
    """A node without ranks has passed the op; a rank that joins there begins behind it."""
    policy, three = changed(POLICY, joins="any"), Term(1, 0, ("a", "b", "c"), (1, 1, 1))
    machine = AgentMachine("c", policy, three, FIRST)
    machine.freeze(1, 1)
    other_order = replace(FIRST, stamp=Stamp(1, 1, 0))
    machine.install(Install(1, 1, other_order, (FIRST,), -1, {0: Run(FIRST.stamp)}))
    machine.join("r2")
    (told,) = machine.freeze(1, 2)
    assert isinstance(told, SendReport)
    others = {n: Report(n, three, 2, other_order, (), {}, -1, {}, {}) for n in ("a", "b")}
    found = decide(policy, three, 2, {**others, "c": told.report}, {}, lambda *_: None)
    assert [seat.since for seat in found.epoch.seats] == [0, 0, 1]


def test_an_op_from_before_others_joined_goes_on_with_those_of_its_ranks_that_are_left() -> None:
    term = Term(2, 0, ("a",), (1,))
    call = call_of(Kind.ALL_REDUCE)
    joined = Epoch(Stamp(1, 1, 0), 1, (*SEATS, Seat("r2", "a", 2, 1)), seated=3)
    begun = {0: OpReport(OpState.OPEN, FIRST.stamp, {"r0": call})}
    report = Report("a", term, 0, joined, (FIRST,), {}, -1, {}, begun)
    found = decide(POLICY, term, 0, {"a": report}, {}, lambda *_: None)
    (without_the_newcomer,) = [each for each in found.older if each != FIRST]
    assert [seat.session for seat in without_the_newcomer.seats] == ["r0"]
    assert [seat.session for seat in found.epoch.seats] == ["r0", "r2"]
    assert found.outcomes == {0: Run(without_the_newcomer.stamp)}
