"""Ops that do not wait for all ranks: who is not waited for, and what their nodes do instead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_core.operations import Kind, Quorum
from allfold_core.survival.decision import decide
from allfold_core.survival.instructions import CallInPlace, Cancel, Installed, SendDoubt, Start
from allfold_core.survival.leader_machine import Freeze, LeaderMachine
from allfold_core.survival.records import Epoch, Seat, Stamp, Term
from allfold_core.survival.reports import (
    Call,
    Doubt,
    Fail,
    Forward,
    Install,
    OpReport,
    OpState,
    Reason,
    Report,
    Run,
)
from tests.core.survival.agents import EPOCH, REDUCED, TERM, decided, machine, report
from tests.core.survival.calls import call_of
from tests.support.policies import policy_with

SESSIONS = sorted(EPOCH.sessions)
NODES = {seat.session: seat.node for seat in EPOCH.seats}


def wanted(quorum: int) -> Call:
    """The call of a rank of an op that needs so many."""
    call = call_of(Kind.ALL_REDUCE)
    return replace(call, fingerprint=replace(call.fingerprint, quorum=Quorum(quorum, 2.5)))


def decision(
    called: list[str], quorum: int, *, dead: tuple[str, ...] = (), reason: Reason = Reason.QUORUM
) -> Install:
    """Decide on op 0, which so many have called."""
    call = wanted(quorum)
    reports = {}
    for node in TERM.voters:
        calls = {s: call for s in called if NODES[s] == node}
        ops = {0: OpReport(OpState.OPEN, None, calls)} if calls else {}
        gone = {s: "died" for s in dead if NODES[s] == node}
        reports[node] = Report(node, TERM, 1, EPOCH, (), gone, -1, {}, ops)
    quorums = frozenset({0} if reason is Reason.QUORUM else ())
    doubts = {} if quorums else {0: Doubt(0, reason, 2.5)}
    policy = policy_with(on_loss="shrink")
    return decide(policy, TERM, 1, reports, doubts, lambda *_: None, None, quorums)


def outcome_of(install: Install) -> Run:
    outcome = install.outcomes[0]
    assert isinstance(outcome, Run)
    return outcome


def test_an_op_whose_quorum_is_there_waits_for_nobody_else() -> None:
    called = SESSIONS[:-1]
    outcome = outcome_of(decision(called, len(called)))
    assert outcome == Run(EPOCH.stamp, frozenset(SESSIONS[-1:]), wanted(len(called)))


def test_an_op_of_which_too_few_have_called_waits_on() -> None:
    called = SESSIONS[:-1]
    assert outcome_of(decision(called, len(SESSIONS))) == Run(EPOCH.stamp)


def test_a_round_for_another_reason_changes_nothing_for_late_ranks() -> None:
    assert outcome_of(decision(SESSIONS[:-1], 1, reason=Reason.MISMATCH)) == Run(EPOCH.stamp)


def test_of_an_op_that_is_run_again_only_those_who_are_left_can_be_late() -> None:
    first, *others = SESSIONS
    install = decision(others[:-1], 1, dead=(first,))
    assert first not in install.epoch.sessions
    outcome = outcome_of(install)
    assert outcome.stamp == install.epoch.stamp
    assert outcome.absent == {others[-1]}


# Newcomers


JOINED = Epoch(Stamp(0, 1, 0), 1, (*EPOCH.seats, Seat("new", "b", 3, 5)), seated=4)


def decision_on(seq: int, called: set[str], *, dead: tuple[str, ...] = ()) -> Install:
    """Decide on an op that need not wait, which these ranks have called in the joined epoch."""
    reports = {}
    for node in TERM.voters:
        calls = dict.fromkeys(sorted(called & JOINED.sessions_on(node)), wanted(1))
        ops = {seq: OpReport(OpState.OPEN, None, calls)} if calls else {}
        gone = dict.fromkeys(JOINED.sessions_on(node).intersection(dead), "died")
        reports[node] = Report(node, TERM, 2, JOINED, (), gone, seq - 1, {}, ops)
    policy = policy_with(on_loss="shrink", max_world=4)
    return decide(policy, TERM, 2, reports, {}, lambda *_: None, None, frozenset({seq}))


def test_the_first_op_of_a_newcomer_waits_for_it_whoever_has_called() -> None:
    """Until then it may pull the state of the others, who go on and change it after the op."""
    assert decision_on(5, {"r0"}).outcomes[5] == Run(JOINED.stamp)
    assert decision_on(5, {"r0", "r1", "r2"}).outcomes[5] == Run(JOINED.stamp)


def test_a_newcomer_that_has_called_is_not_waited_for_any_more_nor_are_the_others() -> None:
    assert decision_on(5, {"new"}).outcomes[5] == Run(JOINED.stamp, EPOCH.sessions, wanted(1))
    late = frozenset({"r1", "r2", "new"})
    assert decision_on(6, {"r0"}).outcomes[6] == Run(JOINED.stamp, late, wanted(1))


def test_a_newcomer_that_dies_before_its_first_op_holds_up_nobody() -> None:
    install = decision_on(5, {"r0"}, dead=("new",))
    assert install.epoch.sessions == EPOCH.sessions
    late = frozenset({"r1", "r2"})
    assert install.outcomes[5] == Run(install.epoch.stamp, late, wanted(1))


@pytest.mark.parametrize("state", [OpState.HELD, OpState.HANDED])
def test_an_op_that_has_a_result_or_an_error_keeps_it_whoever_is_late(state: OpState) -> None:
    call = wanted(1)
    calls = {s: call for s in SESSIONS if NODES[s] == "a"}
    held = Report("a", TERM, 1, EPOCH, (), {}, -1, {}, {0: OpReport(state, EPOCH.stamp, calls)})
    reports = {n: Report(n, TERM, 1, EPOCH, (), {}, -1, {}, {}) for n in TERM.voters} | {"a": held}
    policy = policy_with(on_loss="shrink")
    judge, quorums = (lambda *_: None), frozenset({0})
    install = decide(policy, TERM, 1, reports, {}, judge, None, quorums)
    assert install.outcomes[0] == Forward(EPOCH.stamp, ("a",))
    failed = replace(held, ops={0: OpReport(OpState.FAILED, None, calls, "{}", 0)})
    install = decide(policy, TERM, 1, {**reports, "a": failed}, {}, judge, None, quorums)
    assert install.outcomes[0] == Fail("{}", 0)


# On the late rank's node


def absent(*sessions: str, epoch: Epoch = EPOCH) -> Run:
    return Run(epoch.stamp, frozenset(sessions), wanted(1))


def test_each_call_tells_the_leader_how_many_ranks_of_the_node_have_called() -> None:
    me, call = machine("a"), wanted(2)
    told = [Doubt(0, Reason.QUORUM, 2.5, calls=count, quorum=2) for count in (1, 2)]
    assert me.call(0, "r2", call) == [SendDoubt(told[0])]
    assert me.call(0, "r0", call) == [SendDoubt(told[1]), Start(0, EPOCH)]


def test_a_node_calls_in_place_of_its_late_rank_and_begins() -> None:
    me = machine("a")
    me.call(0, "r2", wanted(1))
    me.freeze(0, 1)
    assert me.install(decided({0: absent("r0")}, EPOCH)) == [
        CallInPlace(0, "r0", wanted(1)),
        Start(0, EPOCH),
    ]
    assert report(me.freeze(0, 2)).ops[0].calls.keys() == {"r0", "r2"}


def test_a_node_of_which_nobody_has_called_calls_for_all_its_ranks() -> None:
    me = machine("a")
    me.freeze(0, 1)
    assert me.install(decided({0: absent("r0", "r1", "r2")}, EPOCH)) == [
        CallInPlace(0, "r0", wanted(1)),
        CallInPlace(0, "r2", wanted(1)),
        Start(0, EPOCH),
    ]


def test_a_rank_that_calls_before_the_decision_has_come_is_not_late() -> None:
    me = machine("a")
    me.call(0, "r2", wanted(1))
    me.freeze(0, 1)
    me.call(0, "r0", wanted(1))
    assert me.install(decided({0: absent("r0")}, EPOCH)) == [Start(0, EPOCH)]


def test_nobody_calls_in_place_of_a_dead_rank_or_of_an_op_that_is_complete() -> None:
    me = machine("a")
    me.call(0, "r2", wanted(1))
    me.rank_ended("r0", "died")
    me.freeze(0, 1)
    assert CallInPlace(0, "r0", wanted(1)) not in me.install(decided({0: absent("r0")}, EPOCH))
    me = machine("a")
    for session in ("r0", "r2"):
        me.call(0, session, wanted(1))
    me.completed(0, EPOCH.stamp)
    me.freeze(0, 1)
    assert me.install(decided({0: absent("r0")}, EPOCH)) == []


def test_what_is_run_again_counts_the_calls_in_place_of_ranks() -> None:
    me = machine("a")
    me.call(0, "r0", wanted(1))
    me.freeze(0, 1)
    me.install(decided({0: absent("r2")}, EPOCH))
    me.freeze(0, 2)
    done = me.install(decided({0: Run(REDUCED.stamp)}, REDUCED, number=2))
    assert done[:2] == [Installed(REDUCED, (EPOCH,)), Cancel(0)]
    assert Start(0, REDUCED) in done


# On the leader


def gathering() -> LeaderMachine:
    """The leader of the second term, in its first round."""
    term = Term(2, 0, ("a", "b"), (0, 0))
    return LeaderMachine(policy_with(), term, EPOCH, lambda *_: None, gathering=True)


def end_round(leader: LeaderMachine, call: Call | None = None) -> list[Install | Freeze]:
    """All nodes report; of op 0, that one rank has called it."""
    for node in leader.term.voters:
        ops = {0: OpReport(OpState.OPEN, None, {"r2": call})} if call and node == "a" else {}
        report = Report(node, leader.term, leader.round, EPOCH, (), {}, -1, {}, ops)
        made = leader.report(report)
    return made


def test_a_round_judges_an_op_even_if_its_quorum_is_there() -> None:
    for doubts in (
        [Doubt(0, Reason.QUORUM), Doubt(0, Reason.FAILED, error="{}")],
        [Doubt(0, Reason.FAILED, error="{}"), Doubt(0, Reason.QUORUM)],
    ):
        leader = gathering()
        for doubt in doubts:
            assert leader.doubt(doubt) == []
        assert end_round(leader)[-1] == Freeze(2, 1)
        assert [each.reason for each in leader.doubts] == [Reason.FAILED]


def test_an_op_that_need_not_wait_needs_not_in_later_rounds_either() -> None:
    """A node that is asked for its next report first never gets the decision."""
    leader = gathering()
    leader.doubt(Doubt(0, Reason.QUORUM))
    end_round(leader, wanted(1))
    first, *rest = end_round(leader, wanted(1))
    assert isinstance(first, Install)
    assert outcome_of(first).absent
    assert not rest
    assert leader.down({"r0": "died"}) == [Freeze(2, 2)]
    again, *_ = end_round(leader, wanted(1))
    assert isinstance(again, Install)
    assert outcome_of(again).absent == outcome_of(first).absent
