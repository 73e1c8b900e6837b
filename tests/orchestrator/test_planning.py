"""The links that a plan reckons with: as they were measured, or as they are configured."""

from __future__ import annotations

import pytest

from allfold_core.plan import LinkModel
from allfold_orchestrator.group_state import Formation, GroupParams, RankSeat
from allfold_orchestrator.planning import SOFTWARE_SECONDS, make_plan
from allfold_orchestrator.rank_map import RankMap
from tests.orchestrator.builders import node

GIGABIT = (50e-6, 117e6)
TEN_GIGABIT = (20e-6, 1.15e9)
UNMEASURED = (0.0, 0.0)


def links_between(*measured: tuple[float, float], configured: LinkModel | None = None) -> LinkModel:
    """What the plan of a group has, one rank on each node, by what the nodes measured."""
    infos = [
        node(f"n{rank}", latency=latency, bandwidth=bandwidth)
        for rank, (latency, bandwidth) in enumerate(measured)
    ]
    seats = {rank: RankSeat(info, f"s{rank}") for rank, info in enumerate(infos)}
    params = GroupParams(len(seats), 30.0, {})
    formation = Formation(1, params, configured or LinkModel(), RankMap(seats))
    return make_plan("g", formation).links


def test_the_slowest_link_of_the_members_counts_in_latency_and_in_bandwidth() -> None:
    far_but_fast, near_but_slow = (5e-3, 4e9), (10e-6, 12e6)
    links = links_between(TEN_GIGABIT, far_but_fast, near_but_slow)
    assert 5e-3 / 2 < links.latency < 5e-3 * 2
    assert 12e6 / 2 < 1 / links.seconds_per_byte < 12e6 * 2
    assert links_between(near_but_slow, TEN_GIGABIT, far_but_fast) == links


def test_measurements_that_differ_a_little_give_the_same_plan() -> None:
    once = links_between(GIGABIT, TEN_GIGABIT)
    again = links_between((55e-6, 115e6), (14e-6, 1.3e9))
    assert once == again
    assert once != links_between(TEN_GIGABIT, TEN_GIGABIT)


def test_the_latency_has_the_software_in_it() -> None:
    assert links_between((0.0, 1e9)).latency > SOFTWARE_SECONDS / 2**0.5


def test_what_was_not_measured_stays_as_it_is_assumed() -> None:
    links = links_between(GIGABIT)
    assert links.overhead == LinkModel().overhead
    assert links.fold_seconds_per_byte == LinkModel().fold_seconds_per_byte


def test_nodes_that_have_not_measured_are_left_out() -> None:
    assert links_between(UNMEASURED, GIGABIT, UNMEASURED) == links_between(GIGABIT)


def test_where_nobody_has_measured_the_links_are_as_assumed() -> None:
    assert links_between(UNMEASURED, UNMEASURED) == LinkModel()


@pytest.mark.parametrize(
    "configured", [LinkModel(latency=1e-3), LinkModel(seconds_per_byte=1e-8), LinkModel(0.1, 1, 1)]
)
def test_links_that_are_configured_win_over_measured_ones(configured: LinkModel) -> None:
    assert links_between(GIGABIT, GIGABIT, configured=configured) == configured
