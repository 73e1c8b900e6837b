"""Results on one node: fetched, handed out and dropped, event by event."""

from __future__ import annotations

from allfold_core.survival.instructions import (
    Cancel,
    Drop,
    Fetch,
    HandOut,
    Installed,
    SendClosing,
)
from allfold_core.survival.reports import (
    Forward,
)
from tests.core.survival.agents import (
    EPOCH,
    PARTS,
    REDUCED,
    SUM,
    decided,
    machine,
)


def test_a_part_of_a_result_is_handed_out_when_all_others_have_theirs() -> None:
    me = machine()
    me.call(0, "r1", PARTS)
    assert me.completed(0, EPOCH.stamp) == [SendClosing(0)]
    assert me.watermark == -1
    assert me.closed(0, EPOCH.stamp) == [HandOut(0, EPOCH.stamp)]
    assert me.watermark == 0


def test_a_result_comes_from_a_holder_for_the_ranks_that_live_once_they_have_called() -> None:
    me = machine("a")
    me.rank_ended("r2", "died")
    me.freeze(0, 1)
    assert me.install(decided({0: Forward(EPOCH.stamp, ("b",))}, REDUCED)) == [
        Installed(REDUCED, (EPOCH,))
    ]
    assert me.fetched(0, REDUCED.stamp) == []
    assert me.call(0, "r0", SUM) == [Fetch(0, EPOCH.stamp, ("b",))]
    assert me.fetched(0, EPOCH.stamp) == [HandOut(0, EPOCH.stamp)]


def test_a_result_that_nobody_is_left_to_get_is_not_fetched() -> None:
    me = machine()
    me.rank_ended("r1", "died")
    me.freeze(0, 1)
    me.install(decided({0: Forward(EPOCH.stamp, ("a",))}))
    assert not me.ops


def test_a_result_that_became_complete_after_the_report_is_not_fetched() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    me.freeze(0, 1)
    me.completed(0, EPOCH.stamp)
    assert me.install(decided({0: Forward(EPOCH.stamp, ("a",))})) == [HandOut(0, EPOCH.stamp)]


def test_parts_that_wait_for_those_of_others_can_be_told_again() -> None:
    me = machine()
    me.call(0, "r1", PARTS)
    assert me.unclosed() == []
    me.completed(0, EPOCH.stamp)
    assert me.unclosed() == [(0, EPOCH.stamp)]
    me.closed(0, EPOCH.stamp)
    assert me.unclosed() == [(0, EPOCH.stamp)]  # the other may not have heard of this one's
    me.learn_watermark("a", 0)
    assert me.unclosed() == []


def test_a_result_is_not_fetched_for_a_rank_that_will_not_call() -> None:
    me = machine("a")
    me.freeze(0, 1)
    me.install(decided({0: Forward(EPOCH.stamp, ("b",))}))
    assert me.call(0, "r0", SUM) == []
    assert me.abandon(0, "r2") == [Fetch(0, EPOCH.stamp, ("b",))]


def test_a_result_that_no_rank_will_take_is_dropped() -> None:
    me = machine("a")
    me.freeze(0, 1)
    me.install(decided({0: Forward(EPOCH.stamp, ("b",))}))
    assert me.abandon(0, "r0") == []
    assert me.abandon(0, "r2") == [Drop(0)]
    assert me.ops == {}
    assert me.abandon(1, "r0") == []  # of an op that nobody has called


def test_what_has_gone_out_of_an_attempt_counts_where_others_have_its_result() -> None:
    me = machine()
    me.call(0, "r1", SUM)
    me.freeze(0, 1)
    assert Cancel(0, forward=True) in me.install(decided({0: Forward(EPOCH.stamp, ("a",))}))
