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
from allfold_core.survival.instructions import Evicted, LeaveEdge, SendDoubt, SendReport
from allfold_core.survival.policy import GroupPolicy
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Doubt, Fail, Install, Reason, Report, Wishes
from tests.core.survival.calls import call_of

SEATS = (Seat("r0", "a"), Seat("r1", "b", 1))
FIRST = Epoch(Stamp(1, 0, 0), 0, SEATS, seated=2)
TERM = Term(1, 0, ("a", "b"), (1, 1))
POLICY = GroupPolicy("g", shrink=True, max_world=4, at_commits=True)


def install(machine: AgentMachine, number: int, epoch: Epoch) -> list[object]:
    machine.freeze(1, number)
    return [*machine.install(Install(1, number, epoch, (), -1, {}))]


def test_ranks_at_an_edge_go_on_though_their_node_hears_of_its_end_only_with_the_next_edge() -> (
    None
):
    machine = AgentMachine("a", POLICY, TERM, FIRST)
    first_edge = replace(FIRST, stamp=Stamp(1, 1, 0), waiting=("r2",), edges=1)
    install(machine, 1, first_edge)
    machine.at_edge("r0", 4, edge=1)
    next_edge = replace(first_edge, stamp=Stamp(1, 3, 0), waiting=("r3",), edges=2)
    assert LeaveEdge(("r0",)) in install(machine, 3, next_edge)


def test_ranks_at_an_edge_stay_while_it_is_the_same_one() -> None:
    machine = AgentMachine("a", POLICY, TERM, FIRST)
    edge = replace(FIRST, stamp=Stamp(1, 1, 0), waiting=("r2",), edges=1)
    install(machine, 1, edge)
    machine.at_edge("r0", 4, edge=1)
    later = replace(edge, stamp=Stamp(1, 2, 0), waiting=("r2", "r3"))
    assert not any(isinstance(each, LeaveEdge) for each in install(machine, 2, later))


def test_a_node_that_was_left_out_and_has_joined_anew_is_out_as_it_was_before() -> None:
    machine = AgentMachine("b", POLICY, TERM, FIRST)
    anew = Term(3, 0, ("a", "b"), (1, 3))
    assert machine.take_term(anew, 0) == [Evicted(anew)]


def test_a_node_that_has_joined_anew_is_no_member_of_epochs_from_before() -> None:
    anew = Term(3, 0, ("a", "b"), (1, 3))
    assert anew.members_of(FIRST) == {"a"}
    assert anew.members_of(replace(FIRST, stamp=Stamp(3, 0, 0))) == {"a", "b"}


def test_a_rank_that_wants_to_leave_a_group_that_is_too_small_costs_one_round() -> None:
    small, wishes = replace(POLICY, min_world=3), {"a": Wishes(leave=("r0",))}
    waiting = with_others_awaited(small, FIRST)
    assert is_due(small, TERM, waiting, wishes)
    announced = announce(waiting, waiting_sessions(small, TERM, waiting, wishes))
    assert not is_due(small, TERM, announced, wishes)


def test_too_few_ranks_wait_in_their_ops_where_others_come_in_anywhere() -> None:
    small = replace(POLICY, min_world=3, at_commits=False)
    machine = AgentMachine("a", small, TERM, FIRST)
    assert machine.call(4, "r0", call_of(Kind.ALL_REDUCE)) == []
    (told,) = machine.freeze(1, 1)
    assert isinstance(told, SendReport)
    other = Report("b", TERM, 1, FIRST, (), {}, -1, {}, {})
    reports = {"a": told.report, "b": other}
    assert decide(small, TERM, 1, reports, {}, lambda *_: None).outcomes == {}


def test_too_few_ranks_call_nothing_where_others_come_in_at_edges() -> None:
    """They are told so by the failure of what they have called already."""
    small = replace(POLICY, min_world=3)
    machine = AgentMachine("a", small, TERM, FIRST)
    assert machine.call(4, "r0", call_of(Kind.ALL_REDUCE)) == [SendDoubt(Doubt(4, Reason.STALE))]
    (told,) = machine.freeze(1, 1)
    assert isinstance(told, SendReport)
    reports = {"a": told.report, "b": Report("b", TERM, 1, FIRST, (), {}, -1, {}, {})}
    install = decide(small, TERM, 1, reports, {}, lambda *_: None)
    failed = install.outcomes[4]
    assert isinstance(failed, Fail)
    assert "2 ranks are left and min_world is 3" in failed.error
