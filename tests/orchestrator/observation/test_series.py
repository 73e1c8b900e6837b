"""Figures over time from the histories of several agents."""

from __future__ import annotations

from allfold_core.figures import group_figures
from allfold_orchestrator.observation.series import WINDOW_SECONDS, Series
from tests.orchestrator.observations import history_of, sample

NOW = 10_000.0
KEY = ("train", 1)


def taken(**histories: list[dict[str, object]]) -> Series:
    """Return the series of these nodes' samples."""
    series = Series()
    for node, samples in histories.items():
        series.take(node, history_of(node, "train", NOW, *samples), NOW)
    series.settle(NOW)
    return series


def test_a_second_has_the_largest_figure_of_any_node() -> None:
    series = taken(
        a=[sample(NOW - 5, ops=10, bytes=400, latency=0.25, skew=None)],
        b=[sample(NOW - 5, ops=9, bytes=360, latency=0.5, skew=0.125)],
    )
    (point,) = series.points(KEY, 0.0)
    assert point == {
        "at": NOW - 5,
        "ops_per_second": 10,
        "bytes_per_second": 400,
        "latency": 0.5,
        "skew": 0.125,
        "own": {},
    }


def test_figures_are_per_second_whatever_a_sample_lasted() -> None:
    series = taken(a=[sample(NOW - 5, ops=10, bytes=400, seconds=2.0)])
    (point,) = series.points(KEY, 0.0)
    assert (point["ops_per_second"], point["bytes_per_second"]) == (5, 200)


def test_ranks_on_several_nodes_are_as_far_apart_as_their_own_times() -> None:
    series = taken(
        a=[sample(NOW - 5, skew=0.0, ranks={"0": {"own": 0.25, "late": 0.0}})],
        b=[sample(NOW - 5, skew=0.0, ranks={"1": {"own": 1.0, "late": 0.0}})],
    )
    (point,) = series.points(KEY, 0.0)
    assert point["skew"] == 0.75
    assert point["own"] == {0: 0.25, 1: 1.0}


def test_a_node_whose_clock_is_set_back_is_asked_for_what_it_counts_from_then_on() -> None:
    series = Series()
    series.take("a", history_of("a", "train", NOW, sample(NOW - 1)), NOW)
    counted_before, counted_since = sample(NOW), sample(NOW - 3601)
    answer = history_of("a", "train", NOW - 3600, counted_before, counted_since)
    series.take("a", answer, NOW + 1)
    assert series.since("a", NOW) == NOW - 3600
    series.settle(NOW + 5)
    assert [point["at"] for point in series.points(KEY, 0.0)] == [NOW - 1, NOW]
    series.settle(NOW + 3700)
    assert series.points(KEY, 0.0) == [], "no figures of an hour ago appear"


def test_a_clock_that_is_wrong_is_corrected() -> None:
    series = Series()
    series.take("a", history_of("a", "train", NOW + 3600, sample(NOW + 3595)), NOW)
    series.settle(NOW)
    assert [point["at"] for point in series.points(KEY, 0.0)] == [NOW - 5]
    assert series.since("a", NOW) == NOW + 3595


def test_only_seconds_to_which_nothing_is_added_any_more_are_told() -> None:
    series = taken(a=[sample(NOW - 5), sample(NOW - 1)])
    assert [point["at"] for point in series.points(KEY, 0.0)] == [NOW - 5]
    series.settle(NOW + 2)
    assert [point["at"] for point in series.points(KEY, NOW - 5)] == [NOW - 1]


def test_the_first_question_is_for_the_whole_window_and_old_seconds_are_dropped() -> None:
    series = taken(a=[sample(NOW - 5)])
    assert series.since("new", NOW) == NOW - WINDOW_SECONDS
    series.settle(NOW + WINDOW_SECONDS)
    assert series.points(KEY, 0.0) == []
    series.settle(NOW + WINDOW_SECONDS)
    assert series.recent(KEY, NOW) == {}


def test_current_figures_are_of_the_latest_seconds_of_one_opening() -> None:
    series = taken(a=[sample(NOW - 60, ops=999), sample(NOW - 5, ops=10), sample(NOW - 4, ops=20)])
    (figures,) = group_figures(series.recent(KEY, NOW))
    assert figures.ops == 15
    assert group_figures(series.recent(("train", 2), NOW)) == []
