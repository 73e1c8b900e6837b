"""Figures of groups and links, from the histories of several agents."""

from __future__ import annotations

from typing import Any

import pytest

from allfold_core.figures import (
    GroupFigures,
    LinkFigures,
    group_figures,
    link_figures,
    recent_samples,
)

NOW = 1000.0
WINDOW = 5.0


def sample(age: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "at": NOW - age, "seconds": 1.0, "ops": 100, "bytes": 4000, "latency": 0.002,
        "skew": 0.001, "ranks": {}, "edges": {},
    } | more  # fmt: skip


def history(node: str, *samples: dict[str, Any], name: str = "dp", opening: int = 1) -> Any:
    group = {"name": name, "opening": opening, "samples": list(samples)}
    return {"node": node, "now": NOW, "groups": [group]}


def own(**times: float) -> dict[str, Any]:
    """Own times by rank: ``own(r0=0.01)``."""
    return {name[1:]: {"own": each, "late": each / 10} for name, each in times.items()}


def groups_of(told: list[Any]) -> list[GroupFigures]:
    return group_figures(recent_samples(told, WINDOW))


def links_of(told: list[Any]) -> list[LinkFigures]:
    return link_figures(recent_samples(told, WINDOW))


def test_rates_are_over_the_window_and_old_samples_do_not_count() -> None:
    young = [sample(1), sample(2, ops=300)]
    (group,) = groups_of([history("a", *young, sample(9, ops=9999))])
    assert (group.ops, group.bytes) == (200.0, 4000.0)
    assert (group.latency, group.skew) == (0.002, 0.001)


def test_the_ops_of_a_group_are_not_counted_once_per_node() -> None:
    told = [history("a", sample(ops=100)), history("b", sample(ops=101, latency=0.005))]
    (group,) = groups_of(told)
    assert group.ops == 101.0
    assert group.latency == 0.005


def test_groups_of_one_name_are_told_apart_and_idle_ones_have_no_times() -> None:
    idle = sample(ops=0, bytes=0, latency=None, skew=None)
    told = [history("a", idle, opening=2), history("b", sample(), opening=1)]
    assert [(each.opening, each.latency) for each in groups_of(told)] == [
        (1, 0.002),
        (2, None),
    ]
    assert groups_of([history("a", sample(99)), history("b")]) == []


def test_the_rank_that_computes_longest_is_first_wherever_it_is() -> None:
    told = [
        history("a", sample(ranks=own(r0=0.010, r1=0.011))),
        history("b", sample(ranks=own(r2=0.030, r3=0.009)), sample(ranks=own(r2=0.050))),
    ]
    (group,) = groups_of(told)
    assert [each.rank for each in group.ranks] == [2, 1, 0, 3]
    slowest = group.ranks[0]
    assert slowest.node == "b"
    assert slowest.behind == pytest.approx(4.0)
    assert slowest.own == pytest.approx(0.04)
    assert group.straggler(1.3) == slowest
    assert group.straggler(5.0) is None


def test_a_rank_that_is_alone_is_behind_nobody() -> None:
    (group,) = groups_of([history("a", sample(ranks=own(r0=0.01)))])
    assert group.ranks[0].behind is None
    assert group.straggler(1.0) is None


def test_links_are_added_up_over_groups_and_the_busiest_is_first() -> None:
    told = [
        history("a", sample(edges={"b": {"out": 100, "in": 7}, "c": {"out": 0, "in": 0}})),
        history("b", sample(edges={"a": {"out": 300, "in": 9}})),
        history("a", sample(edges={"b": {"out": 50, "in": 7}}), name="tp"),
    ]
    links = [(each.source, each.target, each.bytes) for each in links_of(told)]
    assert links == [("b", "a", 300.0), ("a", "b", 150.0)]


def test_what_a_sender_does_not_say_is_what_its_receiver_counts() -> None:
    told = [history("b", sample(edges={"a": {"out": 0, "in": 80}}))]
    links = [(each.source, each.target, each.bytes) for each in links_of(told)]
    assert links == [("a", "b", 80.0)]


def test_ranks_on_several_nodes_are_as_far_apart_as_their_own_times() -> None:
    told = [
        history("a", sample(ranks=own(r0=0.25))),
        history("b", sample(ranks=own(r1=1.0))),
    ]
    (group,) = groups_of(told)
    assert group.skew == 0.75
    (alone,) = groups_of(told[:1])
    assert alone.skew == 0.001


def test_the_json_form_has_all_figures() -> None:
    (group,) = groups_of([history("a", sample(ranks=own(r0=0.25)))])
    assert group.to_dict()["ranks"][0]["own"] == 0.25
