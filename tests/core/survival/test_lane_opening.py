"""The short lane between nodes: a round opens it if all wish for it, and any other closes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_control.survival import pack, unpack
from allfold_core.operations import Kind
from allfold_core.survival.decision import decide, first_in_lane, is_wished
from allfold_core.survival.instructions import Cancel, Fetch, HandOut, OpenLane, SendWishes, Start
from allfold_core.survival.leader_machine import Freeze, LeaderMachine
from allfold_core.survival.records import Epoch, Term
from allfold_core.survival.reports import (
    NO_LANE,
    Forward,
    Install,
    OpState,
    Report,
    Run,
    Wishes,
)
from tests.core.survival.agents import EPOCH, REDUCED, SUM, TERM, decided, machine, report
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

READY = Wishes(lane=True)
POLICY = policy_with(on_loss="shrink")


def said(node: str, *, lane: bool = True, number: int = 1, **called: int) -> Report:
    return Report(node, TERM, number, EPOCH, (), {}, -1, called, {}, wishes=Wishes(lane=lane))


def leader() -> LeaderMachine:
    return LeaderMachine(POLICY, TERM, EPOCH, lambda *_: None, gathering=False)


def open_at(number: int, first: int = 9) -> Install:
    return replace(decided({}, number=number), lane=first)


def gather(lead: LeaderMachine, number: int, *, a: bool = True, b: bool = True) -> Install:
    lead.report(said("a", lane=a, number=number))
    (install,) = lead.report(said("b", lane=b, number=number))
    assert isinstance(install, Install)
    return install


def test_the_lane_begins_behind_all_that_any_rank_has_called() -> None:
    reports = {"a": said("a", r0=3, r2=5), "b": said("b", r1=4)}
    first = first_in_lane(EPOCH, EPOCH, reports, {})
    assert first > 5
    assert first_in_lane(EPOCH, EPOCH, reports, {7: Run(EPOCH.stamp)}) == first + 2


@pytest.mark.parametrize(
    ("reports", "epoch"),
    [
        ({"a": said("a"), "b": said("b", lane=False)}, EPOCH),
        ({"a": said("a")}, EPOCH),
        ({"a": said("a"), "b": said("b")}, REDUCED),
        ({"a": said("a"), "b": said("b")}, replace(EPOCH, waiting=("new",), boundaries=1)),
    ],
    ids=["one node does not wish for it", "one is silent", "ranks are lost", "somebody waits"],
)
def test_the_lane_stays_closed(reports: dict[str, Report], epoch: Epoch) -> None:
    assert first_in_lane(EPOCH, epoch, reports, {}) == NO_LANE


def test_nobody_wishes_for_the_lane_of_a_group_that_is_over() -> None:
    assert not is_wished(Epoch(EPOCH.stamp, 1, ()), {"a": READY})


def test_a_round_that_all_nodes_wish_for_opens_the_lane_with_its_decision() -> None:
    install = decide(POLICY, TERM, 1, {"a": said("a"), "b": said("b")}, {}, lambda *_: None)
    assert install.lane >= 0
    assert unpack(Install, pack(install)) == install


def test_a_decision_without_a_word_of_the_lane_opens_none() -> None:
    packed = pack(decided({}))
    del packed["lane"]
    assert unpack(Install, packed).lane == NO_LANE


def test_the_leader_opens_the_lane_once_the_last_node_wishes_for_it() -> None:
    lead = leader()
    assert lead.wish("a", READY) == []
    assert lead.wish("b", READY) == [Freeze(0, 1)]
    assert gather(lead, 1).lane >= 0
    assert lead.wish("b", READY) == []


def test_a_node_that_withdraws_its_wish_has_the_leader_close_the_lane() -> None:
    lead = leader()
    lead.wish("a", READY)
    lead.wish("b", READY)
    gather(lead, 1)
    assert lead.wish("a", Wishes()) == [Freeze(0, 2)]
    assert gather(lead, 2, a=False).lane == NO_LANE
    assert lead.wish("a", READY) == []  # the other one has to wish for it again, too
    assert lead.wish("b", READY) == [Freeze(0, 3)]


def test_a_round_for_another_reason_closes_the_lane_and_no_other_round_follows() -> None:
    lead = leader()
    lead.wish("a", READY)
    lead.wish("b", READY)
    gather(lead, 1)
    assert lead.down({"unknown": "died"}) == [Freeze(0, 2)]
    assert gather(lead, 2, a=False, b=False).lane == NO_LANE


def test_a_wish_is_sent_once_and_a_decision_answers_it() -> None:
    agent = machine()
    assert agent.wish_for_lane(True) == [SendWishes(READY)]
    assert agent.wish_for_lane(True) == []
    assert agent.has_wished
    assert report(agent.freeze(0, 1)).wishes == READY
    assert OpenLane(9) in agent.install(open_at(1))
    assert agent.wishes.lane
    agent.freeze(0, 2)
    assert not any(isinstance(each, OpenLane) for each in agent.install(decided({}, number=2)))
    assert not agent.wishes.lane


def test_a_node_that_is_out_wishes_for_nothing() -> None:
    agent = machine()
    agent.evict()
    assert agent.wish_for_lane(True) == []


def test_a_node_that_has_closed_the_lane_says_so_in_its_report_alone() -> None:
    agent = machine()
    agent.freeze(0, 1)
    agent.wish_for_lane(True)
    agent.install(open_at(1))
    agent.leave_lane()
    assert report(agent.freeze(0, 2)).wishes == Wishes()


# Ops that the ranks have done by themselves


def test_ops_that_the_ranks_have_done_are_passed_up_to_the_next_one_that_is_known() -> None:
    agent = machine()
    agent.call(5, "r1", SUM)
    agent.passed_by_ranks(9)
    assert agent.watermark == 4
    agent.completed(5, EPOCH.stamp)
    assert agent.watermark == 9
    agent.passed_by_ranks(7)
    assert agent.watermark == 9


def test_what_ranks_have_called_by_themselves_is_reported() -> None:
    agent = machine()
    agent.call(3, "r1", SUM)
    agent.note_called({"r1": 2})
    assert report(agent.freeze(0, 1)).called == {"r1": 3}
    agent.note_called({"r1": 12})
    assert agent.called == {"r1": 12}


def test_a_result_of_the_short_lane_is_held_for_nodes_that_lack_it() -> None:
    agent = machine()
    agent.passed_by_ranks(4)
    agent.hold(4, {"r1": SUM})
    told = report(agent.freeze(0, 1))
    assert told.ops[4].state is OpState.HANDED
    assert told.ops[4].stamp == EPOCH.stamp
    other = Report("a", TERM, 1, EPOCH, (), {}, -1, {}, {})
    install = decide(POLICY, TERM, 1, {"a": other, "b": told}, {}, lambda *_: None)
    assert install.outcomes == {4: Forward(EPOCH.stamp, ("b",))}
    agent.install(install)
    assert agent.ops[4].forward


GATHER = call_of(Kind.GATHER)


def test_a_part_that_a_node_holds_as_the_lane_is_closed_awaits_a_round() -> None:
    agent = machine()
    agent.passed_by_ranks(3)
    agent.hold(4, {"r1": GATHER}, is_handed_out=False)
    assert agent.is_undecided(4)
    assert not agent.is_undecided(5)
    assert agent.expected_stamp(4) == EPOCH.stamp, "others may have begun anew"
    assert agent.call(4, "r1", GATHER) == []
    told = report(agent.freeze(0, 1))
    assert (told.ops[4].state, told.ops[4].stamp) == (OpState.HELD, EPOCH.stamp)


def test_a_part_is_handed_out_if_all_nodes_hold_theirs() -> None:
    agent = machine()
    agent.passed_by_ranks(3)
    agent.hold(4, {"r1": GATHER}, is_handed_out=False)
    agent.freeze(0, 1)
    done = agent.install(decided({4: Forward(EPOCH.stamp, ("a", "b"))}))
    assert HandOut(4, EPOCH.stamp) in done
    assert not agent.is_undecided(4)
    assert agent.expected_stamp(4) is None


def test_a_part_is_given_up_and_the_op_begins_again_if_a_node_lacks_its_own() -> None:
    agent = machine()
    agent.passed_by_ranks(3)
    agent.hold(4, {"r1": GATHER}, is_handed_out=False)
    agent.freeze(0, 1)
    done = agent.install(decided({4: Run(EPOCH.stamp)}))
    assert [each for each in done if isinstance(each, Cancel | Start)] == [
        Cancel(4),
        Start(4, EPOCH),
    ]
    assert not agent.is_undecided(4)
    assert not agent.ops[4].by_lane


def test_a_whole_result_of_the_lane_serves_the_nodes_that_lack_theirs() -> None:
    holder, other = machine(), machine()
    for each in (holder, other):
        each.passed_by_ranks(3)
    holder.hold(4, {"r1": GATHER}, is_whole=True)
    assert holder.unclosed() == [], "nobody has to know that the others hold theirs"
    told = unpack(Report, pack(report(holder.freeze(0, 1))))
    lacking = report(other.freeze(0, 1))
    install = decide(
        POLICY, TERM, 1, {"a": replace(lacking, node="a"), "b": told}, {}, lambda *_: None
    )
    assert install.outcomes == {4: Forward(EPOCH.stamp, ("b",))}
    other.install(replace(install, outcomes={4: Forward(EPOCH.stamp, ("a",))}))
    assert other.call(4, "r1", GATHER) == [Fetch(4, EPOCH.stamp, ("a",))]
    assert HandOut(4, EPOCH.stamp) in other.fetched(4, EPOCH.stamp)
    again = report(other.freeze(0, 2)).ops[4]
    assert (again.state, again.serves_all) == (OpState.HANDED, True), "if the first holder dies"


def test_an_op_behind_those_of_the_short_lane_begins_as_any_other() -> None:
    agent = machine()
    agent.passed_by_ranks(4)
    call = call_of(Kind.ALL_REDUCE)
    assert agent.call(5, "r1", call) == [Start(5, EPOCH)]


def test_only_a_new_round_and_a_term_that_may_follow_are_taken() -> None:
    agent = machine()
    assert agent.may_freeze(0, 1)
    agent.freeze(0, 1)
    assert not agent.may_freeze(0, 1)
    later = Term(1, 0, ("a", "b"), (0, 0))
    assert agent.may_take(later, 0)
    assert not agent.may_take(later, 1)
    assert not agent.may_take(TERM, 0)
