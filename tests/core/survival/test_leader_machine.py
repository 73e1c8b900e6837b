"""A leader runs one round after the other, and a burst of news costs two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allfold_core.errors import PeerMissing
from allfold_core.operations import Kind
from allfold_core.survival.leader_machine import Freeze, LeaderMachine
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import Doubt, Fail, Install, OpReport, OpState, Reason, Report
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

TERM = Term(2, 0, ("a", "b"), (0, 0))
EPOCH = Epoch(Stamp(2, 0, 0), 0, tuple(Seat(f"s{n}", "aabb"[n]) for n in range(4)))


def judge(_seq: int, _epoch: Epoch, _reports: object, doubt: Doubt | None) -> PeerMissing | None:
    is_late = doubt is not None and doubt.reason is Reason.DEADLINE
    return PeerMissing("late") if is_late else None


def leader(*, gathering: bool = False) -> LeaderMachine:
    return LeaderMachine(policy_with(on_loss="shrink"), TERM, EPOCH, judge, gathering=gathering)


def report(node: str, number: int, term: Term = TERM, **dead: str) -> Report:
    ops = {0: OpReport(OpState.OPEN, None, {"s0": call_of(Kind.ALL_REDUCE)})}
    return Report(node, term, number, EPOCH, (), dead, -1, {}, ops if node == "a" else {})


def test_a_term_begins_with_a_round_that_nobody_asks_for() -> None:
    machine = leader(gathering=True)
    assert list(machine.missing) == ["a", "b"]
    assert machine.report(report("b", 0)) == []
    assert list(machine.missing) == ["a"]
    (install,) = machine.report(report("a", 0))
    assert isinstance(install, Install)
    assert (install.term, install.round, install.epoch) == (2, 0, EPOCH)
    assert list(machine.missing) == []


def test_a_burst_of_deaths_costs_two_rounds() -> None:
    machine = leader()
    assert machine.down({"s1": "died"}) == [Freeze(2, 1)]
    assert machine.down({"s2": "died"}) == []
    assert machine.down({"s3": "died"}) == []
    machine.report(report("a", 1, s1="died"))
    first, again = machine.report(report("b", 1, s2="died"))
    assert isinstance(first, Install)
    assert first.dead == {"s1", "s2"}
    assert again == Freeze(2, 2)
    machine.report(report("a", 2, s1="died"))
    (second,) = machine.report(report("b", 2, s2="died", s3="died"))
    assert isinstance(second, Install)
    assert second.dead == {"s1", "s2", "s3"}


def test_deaths_that_the_reports_tell_of_anyway_need_no_round_of_their_own() -> None:
    machine = leader()
    machine.down({"s1": "died"})
    machine.down({"s2": "died"})
    machine.report(report("a", 1, s1="died"))
    assert len(machine.report(report("b", 1, s2="died"))) == 1


def test_news_of_a_rank_that_no_report_knows_starts_one_round_and_not_rounds_for_ever() -> None:
    machine = leader()
    assert machine.down({"unknown": "died"}) == [Freeze(2, 1)]
    machine.report(report("a", 1))
    assert len(machine.report(report("b", 1))) == 1


def test_a_doubt_while_a_round_gathers_is_judged_by_the_next_one() -> None:
    machine = leader()
    machine.down({"s3": "died"})
    assert machine.doubt(Doubt(0, Reason.DEADLINE, 1.0)) == []
    machine.report(report("a", 1))
    first, again = machine.report(report("b", 1, s3="died"))
    assert isinstance(first, Install)
    assert "late" not in str(first.outcomes[0])
    assert again == Freeze(2, 2)
    machine.report(report("a", 2))
    (second,) = machine.report(report("b", 2, s3="died"))
    assert isinstance(second, Install)
    assert isinstance(second.outcomes[0], Fail)
    assert "late" in second.outcomes[0].error
    assert machine.doubt(Doubt(0, Reason.DEADLINE, 2.0)) == [Freeze(2, 3)]


def test_a_deadline_is_judged_although_the_op_was_doubted_for_its_calls_before() -> None:
    machine = leader(gathering=True)
    machine.doubt(Doubt(0, Reason.STALE))
    machine.doubt(Doubt(0, Reason.DEADLINE, 1.0))
    machine.doubt(Doubt(0, Reason.MISMATCH))
    machine.report(report("a", 0))
    machine.report(report("b", 0))
    machine.report(report("a", 1))
    (install,) = machine.report(report("b", 1))
    assert isinstance(install, Install)
    assert isinstance(install.outcomes[0], Fail)


def test_a_failure_of_an_attempt_that_is_over_hides_no_other() -> None:
    machine = leader(gathering=True)
    failed = Doubt(0, Reason.FAILED, stamp=EPOCH.stamp)
    again = replace(failed, stamp=Stamp(2, 1, 0))
    of_the_op = replace(failed, stamp=None)
    for doubt in (failed, again, failed, of_the_op, again):
        machine.doubt(doubt)
    machine.report(report("a", 0))
    machine.report(report("b", 0))
    assert machine.doubts == (of_the_op,)
    for doubt in (again, failed):
        machine.doubt(doubt)
    machine.report(report("a", 1))
    machine.report(report("b", 1))
    assert machine.doubts == (again,)


def test_reports_of_other_rounds_terms_and_nodes_do_not_count() -> None:
    machine = leader(gathering=True)
    other = Term(1, 0, ("a", "b"), (0, 0))
    strangers: list[Any] = [report("a", 1), report("a", 0, other), report("c", 0)]
    assert [machine.report(each) for each in strangers] == [[], [], []]
    assert list(machine.missing) == ["a", "b"]
    machine.report(report("a", 0))
    assert len(machine.report(report("b", 0))) == 1
    assert machine.report(report("b", 0)) == []


def test_what_a_round_judges_stays_until_it_is_decided() -> None:
    machine, late = leader(), Doubt(0, Reason.DEADLINE)
    machine.doubt(late)
    machine.doubt(Doubt(1, Reason.DEADLINE))
    assert machine.doubts == (late,)
    machine.report(report("a", 1))
    machine.report(report("b", 1))
    assert machine.doubts == (Doubt(1, Reason.DEADLINE),)
