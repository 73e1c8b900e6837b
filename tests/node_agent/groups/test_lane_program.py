"""The arithmetic of the short lane between nodes: that of the long lane, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np
import pytest
import torch

from allfold_agent.groups.lane.program import LaneProgram
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from tests.node_agent.groups.lane_nodes import NodesOfALane, Placement, exchange
from tests.support import reference
from tests.support.elements import TORCH_DTYPES
from tests.support.reference import Collective

PLACEMENTS: dict[str, Placement] = {
    "2x1": ((0,), (1,)),
    "2+1": ((0, 1), (2,)),
    "1+2+3": ((5,), (0, 3), (1, 2, 4)),
    "4x1": ((0,), (1,), (2,), (3,)),
}
FLOATS = [dtype for dtype in DType if dtype.is_float]
REDUCTIONS = [
    pytest.param(op, dtype, id=f"{op.label} of {dtype.label}")
    for op, dtype in product(ReduceOp, DType)
    if op is not ReduceOp.WEIGHTED_MEAN and op.refusal(dtype) is None
]
NUMELS = (0, 1, 1000)


@pytest.fixture(params=list(PLACEMENTS.values()), ids=list(PLACEMENTS))
def nodes(request: pytest.FixtureRequest) -> NodesOfALane:
    return NodesOfALane(request.param)


def reduction(op: ReduceOp, dtype: DType, numel: int, factor: float = 1.0) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, dtype, (numel,), -1, AUTO, factor=factor)


def gathering(dtype: DType, rows: Sequence[int], width: int = 3) -> Fingerprint:
    """Of blocks of so many rows; they have counts only where they are not all equal."""
    counts = tuple(rows) if len(set(rows)) > 1 else ()
    shape = (width,) if counts else (rows[0], width)
    return Fingerprint(Kind.ALL_GATHER, None, dtype, shape, -1, AUTO, counts=counts)


def in_slots(nodes: NodesOfALane, programs: Sequence[LaneProgram], slot: int) -> list[bytes]:
    """Do an op whose inputs are in the slots; return what each node holds for others."""
    assert all(program.is_in_slots for program in programs)
    memories = [
        program.in_slot(page, slot) for program, page in zip(programs, nodes.pages, strict=True)
    ]
    exchange(programs, memories)
    return [bytes(memory.kept.bytes) for memory in memories]


def check(nodes: NodesOfALane, fingerprint: Fingerprint, case: Collective, slot: int) -> None:
    """Do an op; every rank finds what the reference says."""
    world = nodes.plan.world_size
    for rank in range(world):
        nodes.put(rank, slot, reference.brought(case, rank, world))
    in_slots(nodes, nodes.programs(fingerprint), slot)
    for rank, right in enumerate(reference.results(case, world)):
        if rank != fingerprint.root:  # who has sent a broadcast has it already
            assert nodes.found(rank, slot, fingerprint, len(right)) == right, (rank, case)


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_a_reduction_is_right_on_every_rank(
    nodes: NodesOfALane, op: ReduceOp, dtype: DType
) -> None:
    for slot, numel in enumerate(NUMELS):
        case = Collective("all_reduce", [numel], dtype=dtype.label, op=op.label)
        factor = case.factor if op is ReduceOp.PREMUL_SUM else 1.0
        check(nodes, reduction(op, dtype, numel, factor), case, slot)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_a_gathering_of_equal_and_of_different_blocks_is_right_on_every_rank(
    nodes: NodesOfALane, dtype: DType
) -> None:
    world = nodes.plan.world_size
    rows_of_cases = ([4] * world, [0] * world, list(range(world)), [0] * (world - 1) + [7])
    for slot, rows in enumerate(rows_of_cases):
        case = Collective("all_gather", rows, [3], dtype.label)
        check(nodes, gathering(dtype, rows), case, slot)


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_a_broadcast_from_each_root_is_right_on_every_rank(
    nodes: NodesOfALane, dtype: DType
) -> None:
    for root, numel in product(range(nodes.plan.world_size), NUMELS):
        fingerprint = Fingerprint(Kind.BROADCAST, None, dtype, (numel,), root, AUTO)
        case = Collective("broadcast", [numel], dtype=dtype.label, root=root)
        check(nodes, fingerprint, case, slot=root)


def test_a_barrier_sends_empty_frames_and_holds_nothing(nodes: NodesOfALane) -> None:
    fingerprint = Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO)
    programs = nodes.programs(fingerprint)
    memories = [
        program.in_slot(page, 0) for program, page in zip(programs, nodes.pages, strict=True)
    ]
    frames = exchange(programs, memories)
    count = len(programs)
    assert len({(frame.source, frame.to) for frame in frames}) == len(frames) == count * (count - 1)
    assert not any(frame.payload for frame in frames)
    assert not any(memory.kept.bytes for memory in memories)


# Numbers that are not exact


def random_inputs(nodes: NodesOfALane, dtype: DType, slot: int) -> list[torch.Tensor]:
    """Numbers of very different sizes, by rank: every order of adding them has its own sum."""
    found = []
    for rank in range(nodes.plan.world_size):
        draw = np.random.default_rng([rank, slot])
        values = draw.normal(size=1000) * 2.0 ** draw.integers(-6, 6, 1000)
        found.append(torch.from_numpy(values).to(TORCH_DTYPES[dtype]))
        nodes.put(rank, slot, bytes_of(found[rank]))
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def fold(
    nodes: NodesOfALane, inputs: Sequence[torch.Tensor], kept: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """The sum as the long lane has it: over the ranks of each node first, then over the nodes."""
    sums = []
    for ranks in nodes.placement:
        operands = [inputs[rank].to(kept) * factor for rank in ranks]
        sums.append(list(accumulate(operands, torch.add))[-1])
    return list(accumulate(sums, torch.add))[-1]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM])
def test_sums_have_the_order_and_the_one_rounding_of_the_long_lane(
    nodes: NodesOfALane, op: ReduceOp, dtype: DType
) -> None:
    """And what is held for other nodes is neither divided nor rounded yet."""
    factor = 0.3 if op is ReduceOp.PREMUL_SUM else 1.0
    fingerprint = reduction(op, dtype, 1000, factor)
    kept = TORCH_DTYPES[fingerprint.kept_dtype]
    programs = nodes.programs(fingerprint)
    for slot in (0, 7):
        total = fold(nodes, random_inputs(nodes, dtype, slot), kept, factor)
        all_held = in_slots(nodes, programs, slot)
        divided = total / nodes.plan.world_size if op is ReduceOp.MEAN else total
        right = bytes_of(divided.to(TORCH_DTYPES[dtype]))
        for rank in range(nodes.plan.world_size):
            assert nodes.found(rank, slot, fingerprint, len(right)) == right
        for held in all_held:
            assert held == bytes_of(total)


# What is held


def test_what_is_held_of_an_op_stays_while_later_ones_use_other_slots(
    nodes: NodesOfALane,
) -> None:
    for op in (ReduceOp.SUM, ReduceOp.MEAN):
        programs = nodes.programs(reduction(op, DType.FLOAT32, 1000))
        held = []
        for slot in range(8):
            random_inputs(nodes, DType.FLOAT32, slot)
            in_slots(nodes, programs, slot)
            held.append(bytes(programs[0].in_slot(nodes.pages[0], slot).kept.bytes))
        assert len(set(held)) == 8
        again = [bytes(programs[0].in_slot(nodes.pages[0], slot).kept.bytes) for slot in range(8)]
        assert again == held


def test_of_what_is_only_moved_every_node_holds_the_whole(nodes: NodesOfALane) -> None:
    world = nodes.plan.world_size
    given = [bytes([10 + rank] * 3 * rank) for rank in range(world)]
    for rank, data in enumerate(given):
        nodes.put(rank, 2, data)
    all_held = in_slots(nodes, nodes.programs(gathering(DType.UINT8, list(range(world)))), 2)
    by_node = b"".join(given[rank] for ranks in nodes.placement for rank in ranks)
    assert set(all_held) == {by_node}
    root = world - 1
    fingerprint = Fingerprint(Kind.BROADCAST, None, DType.UINT8, (3 * root,), root, AUTO)
    all_held = in_slots(nodes, nodes.programs(fingerprint), 2)
    assert set(all_held) == {given[root]}


# What others send


@pytest.mark.parametrize(
    ("fingerprint", "right"),
    [
        (reduction(ReduceOp.SUM, DType.FLOAT32, 5), [20, 20, 20]),
        (reduction(ReduceOp.SUM, DType.BFLOAT16, 5), [20, 20, 20]),  # as it is kept: float32
        (reduction(ReduceOp.MAX, DType.BFLOAT16, 5), [10, 10, 10]),
        (gathering(DType.INT16, [1, 2, 3, 4, 5, 0]), [0, 30, 60]),
        (Fingerprint(Kind.BROADCAST, None, DType.INT64, (2,), 3, AUTO), [0, 16, 0]),
        (Fingerprint(Kind.BARRIER, None, DType.UINT8, (0,), -1, AUTO), [0, 0, 0]),
    ],
    ids=["sum", "sum of halves", "maximum of halves", "gathering", "broadcast", "barrier"],
)
def test_each_node_is_expected_to_send_what_it_has(
    fingerprint: Fingerprint, right: list[int]
) -> None:
    nodes = NodesOfALane(PLACEMENTS["1+2+3"])
    for me, program in enumerate(nodes.programs(fingerprint)):
        expected = {
            node: program.nbytes(start, stop) for (node, start), stop in program.expected.items()
        }
        assert expected == {node: size for node, size in enumerate(right) if node != me}
