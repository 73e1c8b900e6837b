"""The terms of a call that follow from its fingerprint and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allfold_agent.compilation.compiler import chunk_elements
from allfold_agent.compilation.op_spec import OpSpec, OpSpecs
from allfold_core.dtypes import DType, Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Fingerprint, Kind, ReduceOp
from allfold_core.schedules.schedule import wire_chunk
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


@pytest.mark.parametrize(
    ("kind", "op", "feedback"),
    [
        (Kind.ALL_REDUCE, ReduceOp.SUM, 0),
        (Kind.ALL_REDUCE, ReduceOp.MAX, 1),
        (Kind.REDUCE_SCATTER, ReduceOp.PRODUCT, 1),
        (Kind.ALL_GATHER, None, 1),
    ],
)
def test_a_sparse_wire_is_for_sums_with_feedback_alone(
    kind: Kind, op: ReduceOp | None, feedback: int
) -> None:
    specs = OpSpecs(make_plan(((0,), (1,))), 0)
    call = Fingerprint(
        kind, op, DType.FLOAT32, (1000,), -1, "auto", wire=Wire.TOPK, feedback=feedback
    )
    with pytest.raises(InvalidArgument, match="wire='topk' is for sums and means with feedback="):
        specs.of(call.pack())
    fine = replace(call, kind=Kind.ALL_REDUCE, reduce_op=ReduceOp.MEAN, feedback=1)
    assert specs.of(fine.pack()).strategy == "direct2"


@pytest.mark.parametrize("wire", Wire)
def test_chunks_are_of_whole_blocks_and_as_long_as_messages_should_be(wire: Wire) -> None:
    links = LinkModel()
    for numel in (1, 1000, 1 << 20, 31_000_000, 1 << 32):
        call = Fingerprint(
            Kind.ALL_REDUCE, ReduceOp.SUM, DType.FLOAT32, (numel,), -1, "auto", wire=wire
        )
        chunk = chunk_elements(call, numel, 4, links)
        right = wire_chunk(wire.nbytes(numel, 4), 4, links)
        assert chunk % (wire.block or 1) == 0
        assert wire.nbytes(chunk, 4) <= max(right, wire.nbytes(wire.grain, 4))
        assert wire.nbytes(chunk + wire.grain, 4) > right
