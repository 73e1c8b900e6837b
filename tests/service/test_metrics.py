"""The values of metrics: what a catalogue admits, and how histograms add up."""

from __future__ import annotations

import pytest

from allfold_service.metrics import Histogram, Metric, Values, counter, gauge, histogram

OPS = counter("ops_total", "Ops.", "group")
AGE = gauge("age_seconds", "Age.")
SECONDS = histogram("op_seconds", "Seconds.", "op")


def samples(values: Values) -> dict[Metric, list[tuple[str, dict[str, str], float]]]:
    found = {}
    for metric, listed in values.families():
        found[metric] = [(name, dict(labels), value) for name, labels, value in listed]
    return found


def test_a_value_on_the_bound_of_a_bucket_is_in_it() -> None:
    found = Histogram((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 11.0):
        found.observe(value)
    assert found.cumulative() == [("1.0", 2), ("10.0", 3), ("+Inf", 4)]
    assert found.sum == 14.0


def test_histograms_of_one_label_add_up_and_stay_as_they_were() -> None:
    values, one, other = Values([SECONDS]), Histogram((1.0,)), Histogram((1.0,))
    one.observe(0.5)
    other.observe(2.0)
    values.observe(SECONDS, one, "sum")
    values.observe(SECONDS, other, "sum")
    assert samples(values)[SECONDS] == [
        ("op_seconds_bucket", {"op": "sum", "le": "1.0"}, 1),
        ("op_seconds_bucket", {"op": "sum", "le": "+Inf"}, 2),
        ("op_seconds_count", {"op": "sum"}, 2),
        ("op_seconds_sum", {"op": "sum"}, 2.5),
    ]
    assert one.counts == [1, 0]


def test_values_of_one_label_are_added_or_replaced() -> None:
    values = Values([OPS, AGE])
    values.add(OPS, 2, "a")
    values.add(OPS, 3, "a")
    values.put(AGE, 7)
    values.put(AGE, 8)
    assert samples(values) == {
        OPS: [("ops_total", {"group": "a"}, 5)],
        AGE: [("age_seconds", {}, 8)],
    }


def test_a_metric_without_values_has_no_samples() -> None:
    assert samples(Values([OPS, SECONDS])) == {OPS: [], SECONDS: []}


def test_a_metric_that_the_catalogue_lacks_is_refused() -> None:
    values = Values([AGE])
    with pytest.raises(KeyError):
        values.add(OPS, 1, "a")
    with pytest.raises(KeyError):
        values.observe(SECONDS, Histogram((1.0,)), "sum")


def test_the_labels_have_to_be_those_of_the_metric() -> None:
    with pytest.raises(ValueError, match=r"ops_total has the labels \('group',\), and got \(\)"):
        Values([OPS]).put(OPS, 1)


def test_names_are_those_that_can_be_queried() -> None:
    assert (OPS.family, OPS.series) == ("ops", ("ops_total",))
    assert AGE.series == ("age_seconds",)
    assert SECONDS.series == ("op_seconds_bucket", "op_seconds_sum", "op_seconds_count")
