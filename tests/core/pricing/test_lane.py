"""The rules of the short lane: the ops for which it is predicted to be no slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from allfold_core.group_options import GroupOptions
from allfold_core.operations import Kind
from allfold_core.plan import Plan
from allfold_core.pricing.lane import (
    LONGEST_BYTES,
    lane_rules,
    lane_strategy,
    sends_everything,
)
from allfold_core.short_lane.choice import LaneRules
from allfold_core.short_lane.page import SLOT_BYTES
from allfold_core.topology import LOOPBACK, Layout, LinkModel, Member, SlowLink

GIGABIT = LinkModel(seconds_per_byte=8e-9)


def plan(nodes: int, links: LinkModel | None = None, **strategies: str) -> Plan:
    members = tuple(Member(f"n{i}", "", "", (i,)) for i in range(nodes))
    order = tuple(range(nodes))
    return Plan("g", 1, nodes, members, order, links or LinkModel(), GroupOptions(1.0, strategies))


def test_on_one_node_every_kind_goes_by_the_lane_up_to_a_slot() -> None:
    assert lane_rules(plan(1, all_reduce="ring")) == LaneRules(dict.fromkeys(Kind, SLOT_BYTES))


def test_between_nodes_every_kind_does_too_while_that_is_faster() -> None:
    for nodes in (2, 8, 12):
        assert lane_rules(plan(nodes)).most_bytes.keys() == set(Kind)
    assert Kind.BROADCAST not in lane_rules(plan(24)).most_bytes, "a tree is faster"
    assert Kind.ALL_REDUCE in lane_rules(plan(24)).most_bytes
    for nodes in (64, 1000):
        assert not lane_rules(plan(nodes)).most_bytes, "not even an exchange, which has one way"


def test_nodes_that_share_cores_have_the_lane_as_its_messages_pass_through_fewer_threads() -> None:
    for nodes in (2, 8, 12):
        assert Kind.ALL_REDUCE in lane_rules(plan(nodes, LinkModel(shared_cores=2))).most_bytes
    assert not lane_rules(plan(40, LinkModel(shared_cores=2))).most_bytes


def test_between_a_few_nodes_of_one_machine_everything_goes_by_the_lane_that_it_takes() -> None:
    for nodes in (2, 3, 4):
        rules = lane_rules(plan(nodes, replace(LOOPBACK, shared_cores=2)))
        assert rules == LaneRules(dict.fromkeys(rules.most_bytes, LONGEST_BYTES))
        assert rules.most_bytes.keys() == set(Kind)


def test_a_group_without_nodes_has_rules_too() -> None:
    assert lane_rules(plan(0)).most_bytes


@pytest.mark.parametrize("kind", [Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.GATHER, Kind.SCATTER])
def test_each_node_gets_all_of_a_short_result_of_which_its_ranks_need_a_part(kind: Kind) -> None:
    for nodes in (2, 4, 8):
        assert sends_everything(kind, plan(nodes), 4096)
        assert not sends_everything(kind, plan(nodes), 1 << 20)
    assert not sends_everything(Kind.SCATTER, plan(8, GIGABIT), 256 << 10), "the bytes take longer"
    assert not sends_everything(Kind.ALL_REDUCE, plan(2), 64), "there it is the result"


def test_a_kind_for_which_the_group_has_another_strategy_does_not() -> None:
    rules = lane_rules(plan(2, all_reduce="ring", all_gather="auto"))
    assert rules.most_bytes.keys() == set(Kind) - {Kind.ALL_REDUCE}


@pytest.mark.parametrize("kind", list(Kind))
def test_between_two_nodes_ops_of_many_slots_go_by_the_lane(kind: Kind) -> None:
    assert lane_rules(plan(2)).most_bytes[kind] == LONGEST_BYTES


@pytest.mark.parametrize(("ranks", "mib"), [(1, 64), (2, 8), (3, 4), (8, 2), (64, 0.25)])
def test_the_more_ranks_a_node_has_the_shorter_are_the_ops_that_one_thread_folds(
    ranks: int, mib: float
) -> None:
    made = plan(2)
    first, second = made.members
    made = replace(made, members=(replace(first, ranks=tuple(range(1, ranks + 1))), second))
    assert lane_rules(made).most_bytes[Kind.ALL_REDUCE] == mib * (1 << 20)


def test_on_a_slow_line_only_what_is_not_longer_there_than_the_lane_saves() -> None:
    """A broadcast leaves the root once for each other node; along a chain it leaves it once."""
    rules = [lane_rules(plan(nodes, GIGABIT)) for nodes in (2, 3, 4, 8)]
    broadcasts = [each.most_bytes[Kind.BROADCAST] for each in rules]
    assert broadcasts[0] == LONGEST_BYTES
    assert broadcasts == sorted(broadcasts, reverse=True)
    assert broadcasts[-1] == SLOT_BYTES
    free = lane_rules(plan(4, LinkModel(seconds_per_byte=0.0)))
    assert free.most_bytes[Kind.BROADCAST] == LONGEST_BYTES


def test_where_links_are_slow_enough_for_a_detour_a_slot_is_the_longest() -> None:
    made = plan(3)
    made = replace(made, layout=Layout(slow=(SlowLink("n0", "n1", 1e-6),)))
    assert lane_rules(made) == LaneRules(dict.fromkeys(Kind, SLOT_BYTES))


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_sum_is_spread_over_the_nodes_from_some_size_on(nodes: int) -> None:
    made = plan(nodes)
    names = [lane_strategy(Kind.ALL_REDUCE, made, 1 << exponent) for exponent in range(25)]
    assert names[0] == "direct"
    assert [pair for pair in pairwise(names) if len({*pair}) > 1] == [("direct", "direct2")]


def test_what_is_only_moved_has_one_strategy() -> None:
    for nbytes in (0, 100, LONGEST_BYTES):
        assert lane_strategy(Kind.ALL_GATHER, plan(4), nbytes) == "direct"
        assert lane_strategy(Kind.BROADCAST, plan(4), nbytes) == "centralized"
        assert lane_strategy(Kind.BARRIER, plan(4), nbytes) == "direct"
