"""Ops of the lane whose ranks get parts of a result that each node has as a whole, or has not."""

from __future__ import annotations

from itertools import product

import pytest

from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.protocol.frames import FrameType
from tests.node_agent.groups.lane_exchanges import FIRST, Exchanges
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement, exchange
from tests.support import reference
from tests.support.reference import Collective

PLACEMENTS: dict[str, Placement] = {
    "2x1": ((0,), (1,)),
    "1+2+3": ((5,), (0, 3), (1, 2, 4)),
    "4x1": ((0,), (1,), (2,), (3,)),
}
KINDS = (Kind.REDUCE, Kind.REDUCE_SCATTER, Kind.GATHER, Kind.SCATTER)


@pytest.fixture(params=list(PLACEMENTS.values()), ids=list(PLACEMENTS))
def nodes(request: pytest.FixtureRequest) -> NodesOfALane:
    return NodesOfALane(request.param)


def call(kind: Kind, dtype: DType, root: int, numel: int = 30) -> Fingerprint:
    op = ReduceOp.SUM if kind.reduces else None
    return Fingerprint(kind, op, dtype, (numel,), root if kind.has_root else -1, AUTO)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda each: each.label)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_each_rank_gets_its_part(
    nodes: NodesOfALane,
    kind: Kind,
    dtype: DType,
    is_whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("allfold_agent.groups.lane.program.sends_everything", lambda *_: is_whole)
    world = nodes.plan.world_size
    for root, numel in product((0, world - 1), (0, 30)):
        fingerprint = call(kind, dtype, root, numel)
        rows = [numel] * world if kind.has_blocks else [numel]
        case = Collective(kind.label, rows, dtype=dtype.label, root=root)
        for rank in range(world):
            nodes.put(rank, 3, reference.brought(case, rank, world))
        programs = nodes.programs(fingerprint)
        assert {program.is_in_parts for program in programs} == {not is_whole}
        memories = [
            program.in_slot(page, 3) for program, page in zip(programs, nodes.pages, strict=True)
        ]
        exchange(programs, memories)
        for rank, right in enumerate(reference.results(case, world)):
            if kind is not Kind.REDUCE or rank == root:  # the others get nothing
                assert nodes.found(rank, 3, fingerprint, len(right)) == right, (rank, case)
        if is_whole:
            kept = {bytes(memory.kept.bytes) for memory in memories}
            assert len(kept) == 1, "each node could serve every other one"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_nobody_waits_for_a_word_where_each_node_has_all(kind: Kind) -> None:
    two = Exchanges(PLACEMENTS["2x1"])
    two.open()
    for rank in (0, 1):
        two.nodes.post(rank, FIRST, call(kind, DType.FLOAT32, 0, 4), bytes(32))
    two.step()
    assert [frame.header.type for frame in two.on_the_way] == [FrameType.DATA] * 2
    two.deliver()
    two.step()
    assert two.published(FIRST) == [True, True]
    assert not two.on_the_way
    held = [bytes(each.results.held()[FIRST].kept.bytes) for each in two.all]
    assert held[0] == held[1] != b""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_of_long_ops_each_node_gets_its_part_alone(nodes: NodesOfALane, kind: Kind) -> None:
    for numel, is_in_parts in ((1000, False), (1 << 20, True)):
        programs = nodes.programs(call(kind, DType.FLOAT32, 0, numel))
        assert {program.is_in_parts for program in programs} == {is_in_parts}
