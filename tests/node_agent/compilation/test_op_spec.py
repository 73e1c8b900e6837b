"""The terms of a call that follow from its fingerprint and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_core.dtypes import DType
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.topology import LinkModel
from tests.support.fakes.local_groups import make_plan

ONE_MACHINE = LinkModel(shared_cores=2)


def spec_of(nodes: int, numel: int, kind: Kind = Kind.ALL_REDUCE) -> OpSpec:
    plan = replace(make_plan(tuple((rank,) for rank in range(nodes))), links=ONE_MACHINE)
    op = ReduceOp.SUM if kind.reduces else None
    call = Fingerprint(kind, op, DType.FLOAT32, (numel,), -1, "auto")
    return OpSpecs(plan, 0).of(call.pack())


@pytest.mark.parametrize("nodes", range(2, 9))
def test_a_short_sum_that_misses_the_lane_is_added_up_in_the_order_of_the_lane(nodes: int) -> None:
    spec = spec_of(nodes, 1000)
    assert spec.is_short
    assert spec.strategy == "direct"


@pytest.mark.parametrize("nodes", range(3, 9))
def test_a_long_sum_that_misses_the_lane_is_spread_over_the_nodes_as_there(nodes: int) -> None:
    spec = spec_of(nodes, 1_000_000)
    assert spec.is_short
    assert spec.strategy == "direct2"


def test_ops_that_never_go_by_the_lane_go_by_the_cheapest_strategy() -> None:
    for spec in (spec_of(7, 20_000_000), spec_of(40, 1000)):
        assert not spec.is_short
        assert spec.strategy != "direct"


def test_a_short_op_that_adds_up_nothing_goes_by_the_cheapest_strategy() -> None:
    spec = spec_of(7, 1000, Kind.ALL_GATHER)
    assert spec.is_short
    assert spec.strategy != "direct"
