"""The links that a plan reckons with: as they were measured, or as they are configured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from allfold_core.group_options import GroupOptions
from allfold_core.topology import LOOPBACK, LinkModel
from allfold_orchestrator.membership.group_state import (
    Formation,
    GroupParams,
    LinkSettings,
    NodeInfo,
    RankSeat,
)
from allfold_orchestrator.membership.planning import (
    ASSUMED_CORES,
    MOST_ON_A_MACHINE,
    SOFTWARE_SECONDS,
    make_plan,
)
from allfold_orchestrator.membership.rank_map import RankMap
from tests.orchestrator.builders import node

GIGABIT = (50e-6, 117e6)
TEN_GIGABIT = (20e-6, 1.15e9)
UNMEASURED = (0.0, 0.0)


def links_between(
    *measured: tuple[float, float], configured: LinkSettings | None = None
) -> LinkModel:
    """Return the links in the plan of a group, one rank per node, by what the nodes measured."""
    infos = [
        node(f"n{rank}", latency=latency, bandwidth=bandwidth)
        for rank, (latency, bandwidth) in enumerate(measured)
    ]
    return links_of_nodes(infos, configured)


def links_at(*addresses: str, configured: LinkSettings | None = None) -> LinkModel:
    """The same by where the nodes listen, as they were measured at 10 Gbit/s."""
    latency, bandwidth = TEN_GIGABIT
    infos = [
        node(f"n{rank}", data_address=address, latency=latency, bandwidth=bandwidth)
        for rank, address in enumerate(addresses)
    ]
    return links_of_nodes(infos, configured)


def links_of_nodes(infos: Sequence[NodeInfo], configured: LinkSettings | None) -> LinkModel:
    seats = {rank: RankSeat(info, f"s{rank}") for rank, info in enumerate(infos)}
    params = GroupParams(len(seats), GroupOptions(30.0))
    formation = Formation(1, params, configured or LinkSettings(), RankMap(seats))
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


DEFAULTS = LinkSettings(LinkModel().latency, 1 / LinkModel().seconds_per_byte)


def test_links_that_are_configured_win_over_measured_ones() -> None:
    configured = LinkSettings(1e-3, 1e8)
    assert links_between(GIGABIT, configured=configured) == LinkModel(1e-3, seconds_per_byte=1e-8)


def test_of_links_what_is_not_configured_is_measured() -> None:
    measured = links_between(GIGABIT)
    latency, bandwidth = LinkSettings(latency=1e-3), LinkSettings(bandwidth=1e8)
    assert links_between(GIGABIT, configured=latency) == replace(measured, latency=1e-3)
    assert links_between(GIGABIT, configured=bandwidth) == replace(measured, seconds_per_byte=1e-8)


def test_links_that_are_configured_as_the_defaults_win_over_measured_ones_too() -> None:
    assert links_between(GIGABIT, configured=DEFAULTS) == LinkModel()


# One machine


@pytest.mark.parametrize("host", ["10.0.0.1", "machine", "[fd00::1]"])
def test_links_of_nodes_that_listen_at_one_host_are_shared(host: str) -> None:
    assert links_at(f"{host}:7402", f"{host}:7404", f"{host}:7406").shared_cores


def test_links_of_one_machine_are_those_of_loopback_however_busy_it_was_when_measured() -> None:
    for latency, bandwidth in (TEN_GIGABIT, (5e-3, 1e8), UNMEASURED):
        infos = [
            node(f"n{rank}", data_address=f"a:{7400 + rank}", latency=latency, bandwidth=bandwidth)
            for rank in range(3)
        ]
        links = links_of_nodes(infos, None)
        assert links == replace(LOOPBACK, shared_cores=ASSUMED_CORES)


def test_the_cores_of_a_shared_machine_are_those_that_its_agents_may_run_on() -> None:
    cases = ((0, 64), (1, 0), (2, 8))
    infos = [
        node(f"n{rank}", data_address=f"a:{7400 + rank}", cores=cores) for rank, cores in cases
    ]
    assert links_of_nodes(infos, None).shared_cores == 8
    silent = [node(f"n{rank}", data_address=f"a:{7400 + rank}") for rank in range(3)]
    assert links_of_nodes(silent, None).shared_cores == ASSUMED_CORES


@pytest.mark.parametrize(
    "addresses",
    [
        ("10.0.0.1:7402", "10.0.0.2:7402"),
        ("a:1", "a:2", "b:1"),
        ("[fd00::1]:7402", "[fd00::2]:7402"),
    ],
)
def test_links_of_nodes_on_several_machines_are_not_shared(addresses: tuple[str, ...]) -> None:
    assert not links_at(*addresses).shared_cores


def test_one_node_alone_shares_with_nobody_however_many_ranks_it_has() -> None:
    assert not links_at("a:1").shared_cores
    alone = node("n0", data_address="a:1")
    assert links_of_nodes([alone] * 4, None) == LinkModel()


def test_more_nodes_than_a_machine_is_taken_to_have_are_not_looked_at() -> None:
    at_most = [f"a:{7400 + number}" for number in range(MOST_ON_A_MACHINE)]
    assert MOST_ON_A_MACHINE == 16
    assert links_at(*at_most).shared_cores
    assert not links_at(*at_most, "a:9999").shared_cores


@pytest.mark.parametrize("configured", [LinkSettings(latency=1e-3), LinkSettings(1, 1), DEFAULTS])
def test_configured_links_are_not_shared_on_one_machine_either(configured: LinkSettings) -> None:
    assert not links_at("a:1", "a:2", configured=configured).shared_cores
