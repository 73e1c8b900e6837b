"""The choice of ops for the short lane: all ranks come to the same, from what all of them know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allfold_core.dtypes import DType, Wire
from allfold_core.group_options import GroupOptions
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.plan import Plan
from allfold_core.schedules.parts import input_numel, output_numel
from allfold_core.short_lane.choice import MOST_NODES, LaneRules
from allfold_core.short_lane.page import SLOT_BYTES
from allfold_core.topology import LinkModel, Member

SUM = Fingerprint(Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (16,), -1, "auto")
BETWEEN_NODES = {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST, Kind.BARRIER}


def plan(nodes: int, links: LinkModel | None = None, **strategies: str) -> Plan:
    members = tuple(Member(f"n{i}", "", "", (i,)) for i in range(nodes))
    order = tuple(range(nodes))
    return Plan("g", 1, nodes, members, order, links or LinkModel(), GroupOptions(1.0, strategies))


def test_on_one_node_every_kind_goes_by_the_lane() -> None:
    assert LaneRules.of(plan(1, all_reduce="ring")) == LaneRules(frozenset(Kind), SLOT_BYTES)


def test_between_nodes_only_kinds_whose_result_serves_all_nodes_do() -> None:
    assert LaneRules.of(plan(2)).kinds == BETWEEN_NODES
    assert LaneRules.of(plan(MOST_NODES)).kinds == BETWEEN_NODES
    assert LaneRules.of(plan(MOST_NODES + 1)).kinds == frozenset()


def test_a_kind_for_which_the_group_has_another_strategy_does_not() -> None:
    rules = LaneRules.of(plan(2, all_reduce="ring", all_gather="auto"))
    assert rules.kinds == BETWEEN_NODES - {Kind.ALL_REDUCE}


def test_on_a_slow_line_only_what_the_mesh_does_not_make_longer_than_the_lane_saves() -> None:
    gigabit = LinkModel(seconds_per_byte=8e-9)
    sizes = [LaneRules.of(plan(nodes, gigabit)).most_bytes for nodes in (2, 3, 4, 8)]
    assert sizes[0] == SLOT_BYTES
    assert sizes == sorted(sizes, reverse=True)
    assert 3 / 2 * sizes[2] * 8e-9 <= 300e-6
    assert LaneRules.of(plan(4, LinkModel(seconds_per_byte=0.0))).most_bytes == SLOT_BYTES


@pytest.mark.parametrize(
    "call",
    [
        replace(SUM, shape=(SLOT_BYTES // 4 + 1,)),
        replace(SUM, strategy="ring"),
        replace(SUM, wire=Wire.BFLOAT16),
        replace(SUM, feedback=1),
        replace(SUM, kind=Kind.ALL_TO_ALL, reduce_op=None, counts=(1, 2, 2, 1)),
        replace(SUM, kind=Kind.ALL_GATHER, reduce_op=None, shape=(SLOT_BYTES // 8 + 1,)),
        replace(SUM, kind=Kind.GATHER, reduce_op=None, root=1, shape=(SLOT_BYTES // 8 + 1,)),
        replace(SUM, shape=(1,) * 60),
    ],
    ids=["long", "strategy", "wire", "feedback", "uneven", "all of them", "at the root", "deep"],
)
def test_an_op_goes_by_the_long_lane(call: Fingerprint) -> None:
    assert not LaneRules.of(plan(1)).serve(call.pack(), 2)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.label)
def test_a_short_op_of_any_kind_does_not(kind: Kind) -> None:
    root = 1 if kind.has_root else -1
    counts = (1,) * 4 if kind is Kind.ALL_TO_ALL else ()
    call = replace(SUM, kind=kind, root=root, counts=counts)
    assert LaneRules.of(plan(1)).serve(call.pack(), 2)
    assert LaneRules.of(plan(2)).serve(call.pack(), 2) is (kind in BETWEEN_NODES)


def test_rules_survive_a_message() -> None:
    rules = LaneRules.of(plan(4, LinkModel(seconds_per_byte=8e-9)))
    assert LaneRules.from_dict(rules.to_dict()) == rules


@given(
    st.sampled_from(sorted(Kind, key=lambda kind: kind.code)),
    st.integers(0, SLOT_BYTES),
    st.integers(1, 5),
    st.data(),
)
def test_what_goes_by_the_lane_fits_the_slots_of_all_ranks(
    kind: Kind, numel: int, ranks: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, ranks - 1)) if kind.has_root else -1
    counts: tuple[int, ...] = ()
    if kind is Kind.ALL_TO_ALL:
        counts = (data.draw(st.integers(0, 3)),) * 2 * ranks
    elif kind.has_blocks and data.draw(st.booleans()):
        counts = tuple(data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
    call = Fingerprint(kind, None, DType.INT16, (numel,), root, "auto", counts=counts)
    sizes = [
        2 * size(call, rank, ranks) for rank in range(ranks) for size in (input_numel, output_numel)
    ]
    assert LaneRules.of(plan(1)).serve(call.pack(), ranks) is (max(sizes) <= SLOT_BYTES)
