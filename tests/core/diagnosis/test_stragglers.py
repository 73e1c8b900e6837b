"""Slow ranks, by the time that each needs between two ops."""

from __future__ import annotations

from allfold_core.diagnosis.stragglers import OwnTime, StragglerWatch, slowest


def times(*means: float, ops: int = 10, window: float = 0.5) -> dict[int, OwnTime]:
    return {rank: OwnTime(ops, mean * ops, window) for rank, mean in enumerate(means)}


def test_the_rank_that_keeps_the_others_waiting_is_named_with_both_figures() -> None:
    found = slowest(times(0.005, 0.005, 0.045, 0.006))
    assert found is not None
    assert (found.rank, found.own, found.others) == (2, 0.045, 0.005)
    assert found.phrase == (
        "is slow: it needs 45 ms between two ops where the others need 5 ms, so that they wait "
        "for it 80% of the time"
    )


def test_a_rank_without_cpu_is_said_to_lack_it() -> None:
    slow = {0: OwnTime(1, 0.1, 2.0), 1: OwnTime(1, 1.5, 2.0, starved=0.7)}
    found = slowest(slow)
    assert found is not None
    assert found.is_starved
    assert found.phrase.startswith("gets too little of its machine's CPUs, and needs 1.50 s")


def test_nobody_is_named_where_all_are_alike_or_it_costs_the_others_little() -> None:
    assert slowest(times(0.010, 0.011, 0.012)) is None
    assert slowest(times(0.001, 0.004, ops=3)) is None  # 9 ms of half a second
    assert slowest(times(0.0001, 0.0015, ops=300)) is None  # less than 2 ms more than the others
    assert slowest(times(0.030, 0.045)) is None  # not twice as long


def test_ranks_without_calls_are_not_compared() -> None:
    assert slowest(times(0.5)) is None
    assert slowest({0: OwnTime(0, 0.0, 0.5), 1: OwnTime(5, 0.4, 0.5)}) is None
    assert OwnTime(0, 0.0, 0.5).mean == 0.0


def test_one_slow_window_is_an_accident_two_are_not() -> None:
    watch = StragglerWatch()
    slow, even = times(0.001, 0.03), times(0.001, 0.001)
    assert watch.judge(slow) is None
    assert watch.judge(even) is None
    assert watch.judge(slow) is None
    found = watch.judge(slow)
    assert found is not None
    assert found.rank == 1


def test_a_rank_stays_named_until_it_was_as_fast_as_the_others_for_a_while() -> None:
    watch = StragglerWatch(patience=2)
    slow, even = times(0.001, 0.03), times(0.001, 0.001)
    named = [watch.judge(each) for each in (slow, slow, even, slow, even, slow, slow, even, even)]
    assert [each is not None for each in named] == [False, *[True] * 7, False]


def test_another_rank_takes_the_place_of_one_that_was_named() -> None:
    watch = StragglerWatch()
    windows = [times(0.001, 0.03)] * 2 + [times(0.03, 0.001)] * 2
    named = [found and found.rank for found in map(watch.judge, windows)]
    assert named == [None, 1, 1, 0]


def test_two_windows_of_different_ranks_are_no_pair() -> None:
    watch = StragglerWatch()
    assert watch.judge(times(0.001, 0.03)) is None
    assert watch.judge(times(0.03, 0.001)) is None
