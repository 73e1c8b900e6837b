"""One node's part in the agreement, event by event."""

from __future__ import annotations

import pytest

from allfold_core.operations import Kind
from allfold_core.survival.decision import ProtocolViolation
from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Evicted,
    HandOut,
    Installed,
    Refuse,
    RefuseCalls,
    Release,
    SendClosing,
    SendDoubt,
    SendDown,
    SendWishes,
    Start,
)
from allfold_core.survival.records import Epoch, Stamp, Term
from allfold_core.survival.reports import (
    Doubt,
    Fail,
    Forward,
    OpState,
    Outcome,
    Reason,
    Run,
)
from allfold_core.verdict import LEFT
from tests.core.survival.agents import (
    ALONE,
    EPOCH,
    PARTS,
    REDUCED,
    SUM,
    TERM,
    decided,
    machine,
    report,
)
from tests.core.survival.calls import call_of


def test_an_op_starts_when_all_local_ranks_have_called_it() -> None:
    me = machine("a")
    assert me.call(0, "r2", SUM) == []
    assert me.call(0, "r0", SUM) == [Start(0, EPOCH)]
    assert me.completed(0, EPOCH.stamp) == [HandOut(0, EPOCH.stamp)]
    assert me.watermark == 0
    assert me.learn_watermark("b", 0) == [Release(0)]
    assert me.learn_watermark("b", 0) == []
    assert me.learn_watermark("unknown", 5) == []
    assert not me.ops


def test_what_the_others_have_come_to_is_learnt_with_an_op_that_is_complete() -> None:
    me = machine()
    for seq in (0, 1):
        me.call(seq, "r1", SUM)
    assert me.completed(0, EPOCH.stamp, -1) == [HandOut(0, EPOCH.stamp)]
    assert me.completed(1, EPOCH.stamp, 0) == [HandOut(1, EPOCH.stamp), Release(0)]


def test_it_is_learnt_as_well_where_the_attempt_has_been_given_up_or_the_node_is_frozen() -> None:
    me = machine()
    for seq in (0, 1):
        me.call(seq, "r1", SUM)
    me.completed(0, EPOCH.stamp)
    assert me.completed(1, REDUCED.stamp, 0) == [Release(0)]
    me.freeze(0, 1)
    assert me.completed(1, EPOCH.stamp, 1) == []
    done = me.install(decided({1: Run(EPOCH.stamp)}))
    assert done == [HandOut(1, EPOCH.stamp), Release(1)]


def test_what_is_frozen_claims_nothing_until_the_decision_of_that_round() -> None:
    me = machine()
    me.call(0, "r1", PARTS)
    assert report(me.freeze(0, 1)).ops[0].state is OpState.OPEN
    assert me.call(1, "r1", SUM) == []
    assert me.completed(0, EPOCH.stamp) == []
    assert me.closed(0, EPOCH.stamp) == []
    assert me.watermark == -1
    assert me.install(decided({}, number=2)) == []
    done = me.install(decided({0: Run(EPOCH.stamp), 1: Run(EPOCH.stamp)}))
    assert done == [SendClosing(0), HandOut(0, EPOCH.stamp), Start(1, EPOCH)]
    assert me.install(decided({})) == []


def test_the_input_of_a_rank_that_withdraws_it_counts_only_where_the_op_was_complete() -> None:
    me = machine("a")
    for seq in (0, 1):
        me.call(seq, "r0", SUM)
        me.call(seq, "r2", SUM)
    me.completed(0, EPOCH.stamp)
    assert me.rank_ended("r2", "left", withdraws=True) == [SendDown((("r2", "left"),))]
    sent = report(me.freeze(0, 1))
    assert sent.ops[0].calls.keys() == {"r0", "r2"}
    assert sent.ops[1].calls.keys() == {"r0"}
    done = me.install(decided({0: Forward(EPOCH.stamp, ("a",)), 1: Run(REDUCED.stamp)}, REDUCED))
    told = RefuseCalls(1, frozenset({"r2"}))
    assert done == [Installed(REDUCED, (EPOCH,)), Cancel(1), told, Start(1, REDUCED)]


def test_a_rank_that_left_without_waiting_for_an_op_that_nobody_begins_is_told() -> None:
    me = machine("a")
    me.call(0, "r2", SUM)
    me.rank_ended("r2", "left", withdraws=True)
    assert report(me.freeze(0, 1)).ops[0].calls == {}
    done = me.install(decided({0: Run(REDUCED.stamp)}, REDUCED))
    assert RefuseCalls(0, frozenset({"r2"})) in done
    assert me.is_open(0), "those who are left may call it"


def test_an_old_or_foreign_freeze_gets_no_report() -> None:
    me = machine()
    assert me.freeze(1, 1) == []
    assert me.freeze(0, 2)
    assert me.freeze(0, 2) == []
    assert me.freeze(0, 1) == []
    assert me.round == 2


def test_an_attempt_is_given_up_before_the_op_runs_again() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    me.freeze(0, 1)
    done = me.install(decided({0: Run(REDUCED.stamp)}, REDUCED))
    assert done == [Installed(REDUCED, (EPOCH,)), Cancel(0), Start(0, REDUCED)]
    assert me.completed(0, EPOCH.stamp) == []
    assert me.closed(0, EPOCH.stamp) == []
    assert me.completed(0, REDUCED.stamp) == [HandOut(0, REDUCED.stamp)]


def test_an_op_of_an_epoch_without_ranks_of_this_node_is_dropped() -> None:
    me = machine("a")
    me.call(0, "r0", SUM)
    me.freeze(0, 1)
    me.install(decided({0: Run(ALONE.stamp)}, ALONE))
    assert not me.ops
    assert me.watermark == 0, "it has no part in the op any more"
    assert report(me.freeze(0, 2)).passed == 0, "nor do ranks that join there"


def test_an_error_stays_until_every_local_rank_has_called_and_all_nodes_know_it() -> None:
    me = machine("a")
    me.call(0, "r0", SUM)
    me.freeze(0, 1)
    fail: dict[int, Outcome] = {0: Fail("{}", 0)}
    assert me.install(decided(fail)) == [Refuse(0, "{}", 0)]
    me.freeze(0, 2)
    assert me.install(decided(fail, number=2)) == []
    assert me.learn_watermark("b", 0) == [Release(0)]
    assert me.failure(0) == Fail("{}", 0)
    assert me.call(0, "r2", SUM) == []
    assert me.failure(0) is None


def test_an_op_that_has_not_failed_has_no_error() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    assert me.failure(0) is None
    assert me.failure(1) is None


def test_what_was_handed_out_cannot_get_another_outcome() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    me.completed(0, EPOCH.stamp)
    me.freeze(0, 1)
    with pytest.raises(ProtocolViolation, match="op 0 has an outcome"):
        me.install(decided({0: Fail("{}", 0)}))


def test_what_another_node_knows_to_be_final_is_handed_out() -> None:
    """Its closing signals are on their way; that node has had the one of this node."""
    me = machine()
    me.call(0, "r1", PARTS)
    me.completed(0, EPOCH.stamp)
    me.freeze(0, 1)
    assert me.install(decided({}, floor=0)) == [HandOut(0, EPOCH.stamp), Release(0)]


def test_a_death_is_told_once() -> None:
    me = machine()
    assert me.rank_ended("r1", "died") == [SendDown((("r1", "died"),))]
    assert me.rank_ended("r1", "left") == []
    assert report(me.freeze(0, 1)).dead == {"r1": "died"}


def test_an_op_that_fewer_than_min_world_would_run_is_doubted_once() -> None:
    me = machine(min_world=3)
    me.freeze(0, 1)
    me.install(decided({}, REDUCED))
    assert me.call(0, "r1", SUM) == [SendDoubt(Doubt(0, Reason.STALE))]
    me.freeze(0, 2)
    assert me.install(decided({}, REDUCED, number=2)) == []


def test_an_op_whose_root_was_lost_before_the_call_is_doubted() -> None:
    me = machine()
    me.freeze(0, 1)
    me.install(decided({}, REDUCED))
    assert me.call(0, "r1", call_of(Kind.BROADCAST, root=2)) == [SendDoubt(Doubt(0, Reason.STALE))]
    assert me.call(1, "r1", call_of(Kind.BROADCAST, root=0)) == [Start(1, REDUCED)]


def test_a_term_counts_if_the_store_of_the_last_registration_has_announced_it() -> None:
    me = machine()
    me.registered(3)
    me.registered(2)
    newer = Term(1, 3, ("b",), (0,), (("a", "died"),))
    assert me.take_term(newer, 2) == []
    assert me.take_term(TERM, 3) == []
    assert report(me.take_term(newer, 3)).term == newer
    assert (me.term, me.round, me.frozen) == (newer, 0, True)


def test_what_a_node_has_said_that_it_holds_stays_true_until_the_answer() -> None:
    """Else another node could teach it a term that the store, which it tells of its own, lacks."""
    me = machine()
    newer = Term(1, 0, ("b",), (0,), (("a", "died"),))
    me.registers()
    assert me.take_term(newer, 0) == []
    me.registered(0)
    assert report(me.take_term(newer, 0)).term == newer


def test_a_term_with_one_who_was_left_out_before_is_not_taken() -> None:
    me = machine()
    me.take_term(Term(1, 0, ("b",), (0,), (("a", "died"),)), 0)
    assert me.take_term(Term(3, 0, ("a", "b"), (0, 0)), 0) == []
    assert report(me.take_term(Term(3, 0, ("a", "b"), (2, 0)), 0)).term.number == 3


@pytest.mark.parametrize("by_term", [True, False])
def test_a_node_that_the_group_goes_on_without_does_nothing_any_more(by_term: bool) -> None:
    me = machine()
    me.call(0, "r1", SUM)
    newer = Term(1, 0, ("a",), (0,), (("b", "silent"),))
    if by_term:
        assert me.take_term(newer, 0) == [Evicted(newer)]
    else:
        me.evict()
    assert me.out
    assert me.completed(0, EPOCH.stamp) == []
    assert me.closed(0, EPOCH.stamp) == []
    assert me.fetched(0, EPOCH.stamp) == []
    assert me.call(1, "r1", SUM) == []
    assert me.rank_ended("r1", "died") == []
    assert me.freeze(0, 1) == []
    assert me.take_term(Term(2, 0, ("a", "b"), (0, 2)), 0) == []
    assert me.install(decided({})) == []


def test_a_copy_goes_its_own_way() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    other = me.copy()
    me.completed(0, EPOCH.stamp)
    me.rank_ended("r1", "died")
    assert other.ops[0].state is OpState.OPEN
    assert not other.dead


def test_frames_are_wanted_of_the_attempt_that_runs_and_of_what_may_come() -> None:
    me = machine()
    assert me.expected_stamp(0) == EPOCH.stamp  # nothing is known of it yet
    me.call(0, "r1", SUM)
    assert me.expected_stamp(0) == EPOCH.stamp
    me.completed(0, EPOCH.stamp)
    assert me.expected_stamp(0) is None  # it is done
    me.learn_watermark("a", 0)
    assert me.expected_stamp(0) is None  # and forgotten


def test_frames_of_what_was_decided_upon_are_wanted_of_that_epoch() -> None:
    me = machine()
    me.freeze(0, 1)
    me.install(decided({0: Run(EPOCH.stamp), 1: Run(REDUCED.stamp)}, REDUCED))
    assert me.expected_stamp(0) == EPOCH.stamp
    assert me.expected_stamp(1) == REDUCED.stamp
    me.freeze(0, 2)
    me.install(decided({2: Forward(EPOCH.stamp, ("a",))}, REDUCED, number=2))
    assert me.expected_stamp(2) is None  # its result is fetched


def test_a_node_without_ranks_wants_no_frames_of_new_ops() -> None:
    me = machine("a")
    me.freeze(0, 1)
    me.install(decided({}, ALONE))
    assert me.expected_stamp(5) is None


def test_a_decision_counts_for_the_round_that_was_reported_to() -> None:
    me = machine()
    assert not me.is_frozen_for(decided({}))
    me.freeze(0, 2)
    assert not me.is_frozen_for(decided({}, number=1))
    assert me.is_frozen_for(decided({}, number=2))


def test_an_error_is_kept_for_a_rank_until_it_calls_or_will_not() -> None:
    me = machine("a")
    me.call(0, "r0", SUM)
    me.freeze(0, 1)
    me.install(decided({0: Fail("{}", 0)}))
    me.learn_watermark("b", 0)
    assert me.failure(0) == Fail("{}", 0)  # r2 has not called it
    me.abandon(0, "r2")
    assert me.called["r2"] == 0
    me.call(1, "r0", SUM)
    me.learn_watermark("b", 1)
    me.learn_floor(0)
    me.call(0, "r0", SUM)  # whatever comes next looks again
    assert me.failure(0) is None


def test_an_error_is_forgotten_when_the_last_rank_will_not_call_its_op() -> None:
    """Even if all nodes have been done with the op for long, and whatever comes next."""
    me = machine("a")
    me.call(0, "r0", SUM)
    me.freeze(0, 1)
    me.install(decided({0: Fail("{}", 0)}))
    me.learn_floor(0)
    assert me.failure(0) == Fail("{}", 0)
    me.abandon(0, "r2")
    assert me.failure(0) is None
    assert me.called["r2"] == 0


def test_what_is_remembered_of_ops_and_refused_calls_ends_with_the_ops() -> None:
    me = machine("a")
    assert me.remembered == 0
    me.abandon(0, "r2")
    me.call(0, "r0", SUM)
    assert me.remembered == 2
    me.freeze(0, 1)
    me.install(decided({0: Fail("{}", 0)}))
    me.learn_floor(0)
    me.learn_watermark("b", 0)
    assert me.remembered == 0


def test_a_rank_whose_wish_to_leave_is_granted_has_left() -> None:
    me = machine("a")
    (wish,) = me.wish_to_leave("r2")
    assert isinstance(wish, SendWishes) and wish.wishes.leave == ("r2",)
    me.freeze(0, 1)
    without = tuple(seat for seat in EPOCH.seats if seat.session != "r2")
    me.install(decided({}, Epoch(Stamp(0, 1, 0), 1, without, REDUCED.change)))
    assert me.dead == {"r2": LEFT}
    assert me.wishes.leave == ()


def test_an_op_that_is_run_again_without_this_node_is_dropped_here() -> None:
    me = machine("a")
    me.call(0, "r0", SUM)
    me.call(0, "r2", SUM)
    me.freeze(0, 1)
    done = me.install(decided({0: Run(ALONE.stamp)}, ALONE))
    assert [Cancel(0), Drop(0)] == [each for each in done if isinstance(each, Cancel | Drop)]


def test_a_node_reports_the_epoch_of_an_error_that_a_rank_has_yet_to_hear() -> None:
    """Another node may have missed the round that made it."""
    me = machine("b")
    for seq in (0, 1):
        me.call(seq, "r1", SUM)
    me.completed(0, EPOCH.stamp)
    me.freeze(0, 1)
    me.install(decided({1: Fail(REDUCED.change, 1)}, REDUCED))
    me.freeze(0, 2)
    later = Epoch(Stamp(0, 2, 0), 2, EPOCH.seats[:2], REDUCED.change)
    me.install(decided({}, later, number=2))
    assert me.learn_watermark("a", 0) == [Release(0)]
    assert report(me.freeze(0, 3)).older == (REDUCED,)


def test_a_node_without_ranks_holds_nothing_back() -> None:
    me = machine("b")
    for seq in (0, 1):
        me.call(seq, "r1", SUM)
        me.completed(seq, EPOCH.stamp)
    me.freeze(0, 1)
    without_a = Epoch(Stamp(0, 1, 0), 1, (EPOCH.seats[1],), REDUCED.change)
    me.install(decided({}, without_a))
    assert me.floor == -1, "ops that it had a part in are not final on all nodes"
    assert me.learn_watermark("a", 0) == [Release(0)]
    assert me.learn_watermark("a", 1) == [Release(1)]
    me.call(2, "r1", call_of(Kind.ALL_REDUCE, view=1))
    assert Release(2) in me.completed(2, without_a.stamp)


def test_an_op_is_open_until_it_has_an_outcome() -> None:
    me = machine("b")
    assert me.is_open(0), "nobody has called it yet"
    me.call(0, "r1", SUM)
    assert me.is_open(0)
    me.completed(0, EPOCH.stamp)
    assert not me.is_open(0)
    me.learn_watermark("a", 0)
    assert 0 not in me.ops
    assert not me.is_open(0)
