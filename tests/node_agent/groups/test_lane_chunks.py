"""Ops of the short lane between nodes that are longer than a frame: chunks, in whatever order."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from random import Random

import numpy as np
import pytest
import torch

from allfold_agent.groups.lane.op_memory import OpMemory, SharedBytes
from allfold_agent.groups.lane.program import LaneProgram
from allfold_agent.runtime.buffers import SharedFile
from allfold_core.dtypes import DType
from allfold_core.operations import AUTO, Fingerprint, Kind, ReduceOp
from allfold_core.schedules.schedule import balanced_slices
from tests.node_agent.groups.lane_nodes import Frame, NodesOfALane, Placement, exchange, raw
from tests.support import reference
from tests.support.elements import TORCH_DTYPES
from tests.support.reference import Collective

LONGEST = 64  # bytes of a frame
SLOT_BYTES = 8
PLACEMENTS: dict[str, Placement] = {
    "2x1": ((0,), (1,)),
    "1+2+3": ((5,), (0, 3), (1, 2, 4)),
    "4x1": ((0,), (1,), (2,), (3,)),
}
ORDERS = (None, Random(1), Random(2))
NUMELS = (3, 40, 500)  # fewer than nodes, up to several chunks of each slice
DTYPES = [DType.FLOAT32, DType.BFLOAT16, DType.INT64]


@pytest.fixture(autouse=True)
def short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allfold_agent.groups.lane.program.LONGEST_PAYLOAD", LONGEST)


@pytest.fixture(params=["direct", "direct2"])
def strategy(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=list(PLACEMENTS))
def nodes(request: pytest.FixtureRequest, strategy: str) -> NodesOfALane:
    return NodesOfALane(PLACEMENTS[request.param], SLOT_BYTES, strategy=strategy)


@pytest.fixture(params=list(PLACEMENTS))
def movers(request: pytest.FixtureRequest) -> NodesOfALane:
    """Nodes for ops that have one strategy."""
    return NodesOfALane(PLACEMENTS[request.param], SLOT_BYTES)


def all_reduce(numel: int, dtype: DType, op: ReduceOp, factor: float = 1.0) -> Fingerprint:
    return Fingerprint(Kind.ALL_REDUCE, op, dtype, (numel,), -1, AUTO, factor=factor)


class Run:
    """One op whose inputs lie in the arenas.

    Attributes:
        programs: of each node.
        memories: of each node.
        results: of each node, the bytes that its ranks take theirs from.
        frames: all that were sent.
    """

    def __init__(
        self,
        nodes: NodesOfALane,
        fingerprint: Fingerprint,
        inputs: Sequence[bytes],
        order: Random | None = None,
    ) -> None:
        self.programs = nodes.programs(fingerprint)
        self.results = [torch.full((p.result_bytes,), 99, dtype=torch.uint8) for p in self.programs]
        self.memories: list[OpMemory] = []
        for node, program in enumerate(self.programs):
            given = [raw(inputs[rank]) for rank in nodes.placement[node]]
            self.memories.append(self._memory(program, given, self.results[node]))
        self.frames: list[Frame] = exchange(self.programs, self.memories, order)

    @staticmethod
    def _memory(
        program: LaneProgram, inputs: Sequence[torch.Tensor], result: torch.Tensor
    ) -> OpMemory:
        """As the exchange has it: longer than it has to be, with whatever was there before."""
        kept, own = (
            torch.full((nbytes + 100,), 77, dtype=torch.uint8) if nbytes else None
            for nbytes in (program.kept_bytes, program.own_bytes)
        )
        given = [SharedBytes(each.numpy().data, None, 0) for each in inputs]
        rows = (
            each if each is None else SharedBytes(each.numpy().data, None, 0)
            for each in (kept, own)
        )
        return program.memory(given, SharedBytes(result.numpy().data, None, 0), *rows)

    def kept(self) -> set[bytes]:
        """Return what nodes keep for others."""
        return {bytes(memory.kept.bytes) for memory in self.memories}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def check(nodes: NodesOfALane, fingerprint: Fingerprint, case: Collective) -> None:
    """Do an op with its frames in several orders; every rank finds what the reference says."""
    world = nodes.plan.world_size
    inputs = [reference.brought(case, rank, world) for rank in range(world)]
    for order in ORDERS:
        run = Run(nodes, fingerprint, inputs, order)
        assert all(len(frame.payload) <= LONGEST for frame in run.frames)
        for rank, right in enumerate(reference.results(case, world)):
            result = run.results[nodes.plan.index_of_rank(rank)]
            if rank != fingerprint.root:  # who has sent a broadcast has it already
                found = nodes.recipe(rank, fingerprint).output_of(result.numpy()).tobytes()
                assert found == right, (rank, order)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_reduction_in_chunks_is_right_on_every_rank(
    nodes: NodesOfALane, dtype: DType, op: ReduceOp
) -> None:
    if op.refusal(dtype) is not None:
        return
    for numel in NUMELS:
        case = Collective("all_reduce", [numel], dtype=dtype.label, op=op.label)
        factor = case.factor if op is ReduceOp.PREMUL_SUM else 1.0
        check(nodes, all_reduce(numel, dtype, op, factor), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_gathering_of_blocks_of_several_chunks_and_of_none_is_right(
    movers: NodesOfALane, dtype: DType
) -> None:
    world = movers.plan.world_size
    for rows in ([30] * world, [17 * rank for rank in range(world)], [0] * (world - 1) + [70]):
        counts = tuple(rows) if len(set(rows)) > 1 else ()
        shape = (3,) if counts else (rows[0], 3)
        fingerprint = Fingerprint(Kind.ALL_GATHER, None, dtype, shape, -1, AUTO, counts=counts)
        check(movers, fingerprint, Collective("all_gather", rows, [3], dtype.label))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_broadcast_of_several_chunks_is_right_from_each_root(
    movers: NodesOfALane, dtype: DType
) -> None:
    for root in range(movers.plan.world_size):
        fingerprint = Fingerprint(Kind.BROADCAST, None, dtype, (100,), root, AUTO)
        check(movers, fingerprint, Collective("broadcast", [100], dtype=dtype.label, root=root))


# Numbers that are not exact


def random_numbers(nodes: NodesOfALane, dtype: DType) -> list[torch.Tensor]:
    """Numbers of very different sizes, by rank: every order of adding them has its own sum."""
    draws = (np.random.default_rng(rank) for rank in range(nodes.plan.world_size))
    values = (draw.normal(size=300) * 2.0 ** draw.integers(-6, 6, 300) for draw in draws)
    return [torch.from_numpy(each).to(TORCH_DTYPES[dtype]) for each in values]


def folded(
    nodes: NodesOfALane, inputs: Sequence[torch.Tensor], kept: torch.dtype, factor: float
) -> torch.Tensor:
    """The sum as the long lane has it: over the ranks of each node first, then over the nodes."""
    sums = [
        list(accumulate((inputs[rank].to(kept) * factor for rank in ranks), torch.add))[-1]
        for ranks in nodes.placement
    ]
    return list(accumulate(sums, torch.add))[-1]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PREMUL_SUM])
def test_sums_of_chunks_have_the_same_bits_in_whatever_order_they_come(
    nodes: NodesOfALane, op: ReduceOp, dtype: DType
) -> None:
    """And what is kept for other nodes is neither divided nor rounded."""
    factor = 0.3 if op is ReduceOp.PREMUL_SUM else 1.0
    fingerprint = all_reduce(300, dtype, op, factor)
    inputs = random_numbers(nodes, dtype)
    total = folded(nodes, inputs, TORCH_DTYPES[fingerprint.kept_dtype], factor)
    divided = total / nodes.plan.world_size if op is ReduceOp.MEAN else total
    right = bytes_of(divided.to(TORCH_DTYPES[dtype]))
    for order in ORDERS:
        run = Run(nodes, fingerprint, [bytes_of(each) for each in inputs], order)
        assert {bytes_of(each) for each in run.results} == {right}
        assert run.kept() == {bytes_of(total)}


@pytest.mark.parametrize(
    ("op", "dtype", "apart"),
    [
        (ReduceOp.SUM, DType.FLOAT32, 0),
        (ReduceOp.MEAN, DType.FLOAT32, 4),
        (ReduceOp.SUM, DType.BFLOAT16, 4),
        (ReduceOp.MAX, DType.BFLOAT16, 0),
    ],
)
def test_what_is_kept_is_the_result_itself_unless_that_is_divided_or_rounded(
    nodes: NodesOfALane, op: ReduceOp, dtype: DType, apart: int
) -> None:
    run = Run(nodes, all_reduce(50, dtype, op), [bytes(50 * dtype.itemsize)] * 9)
    for program, memory in zip(run.programs, run.memories, strict=True):
        assert program.kept_bytes == 50 * apart
        assert (memory.kept is memory.result) is (not apart)


def test_inputs_stay_as_they_were(nodes: NodesOfALane) -> None:
    inputs = random_numbers(nodes, DType.FLOAT32)
    fingerprint = all_reduce(300, DType.FLOAT32, ReduceOp.SUM)
    run = Run(nodes, fingerprint, [bytes_of(each) for each in inputs])
    for ranks, memory in zip(nodes.placement, run.memories, strict=True):
        for rank, given in zip(ranks, memory.inputs, strict=True):
            assert bytes(given.bytes) == bytes_of(inputs[rank])


# What travels


def sent(frames: Sequence[Frame]) -> Counter[tuple[int, int]]:
    """Return the bytes by sender and receiver."""
    found: Counter[tuple[int, int]] = Counter()
    for frame in frames:
        found[frame.source, frame.to] += len(frame.payload)
    return found


@pytest.mark.parametrize("numel", [0, 1, 3, 40, 500])
def test_each_node_sends_each_other_one_its_part_once_and_says_so_where_there_is_none(
    nodes: NodesOfALane, strategy: str, numel: int
) -> None:
    inputs = [bytes(4 * numel)] * nodes.plan.world_size
    frames = Run(nodes, all_reduce(numel, DType.FLOAT32, ReduceOp.SUM), inputs).frames
    count = len(nodes.placement)
    pairs = [pair for pair in product(range(count), repeat=2) if pair[0] != pair[1]]
    assert {(frame.source, frame.to) for frame in frames} == set(pairs)
    slices = [each.stop - each.start for each in balanced_slices(numel, count)]
    for one, other in pairs:
        right = numel if strategy == "direct" else slices[other] + slices[one]
        assert sent(frames)[one, other] == 4 * right
    keys = [(frame.source, frame.to, frame.start) for frame in frames if frame.payload]
    assert len(keys) == len(set(keys))


def test_the_first_chunks_go_to_all_before_the_second_ones(nodes: NodesOfALane) -> None:
    program = nodes.programs(all_reduce(500, DType.FLOAT32, ReduceOp.SUM))[0]
    others = len(nodes.placement) - 1
    assert [node for node, _, _ in program._sends[: 2 * others]] == [*program.others] * 2


# What agents of one machine read where it lies


class InFiles:
    """Memory of one node, each range of it in a file."""

    def __init__(self) -> None:
        self.files: dict[int, torch.Tensor] = {}

    def make(self, nbytes: int, start: int = 24) -> SharedBytes:
        """Return so many bytes, which begin somewhere in a file."""
        whole = torch.randint(0, 100, (start + nbytes,), dtype=torch.uint8)
        file = SharedFile(os.memfd_create("test", os.MFD_CLOEXEC))
        self.files[file.serial] = whole
        return SharedBytes(whole.numpy().data[start:], file, start)

    def memory(self, program: LaneProgram) -> OpMemory:
        inputs = [self.make(nbytes) for nbytes in program.input_bytes]
        result = self.make(program.result_bytes)
        kept, own = (
            self.make(nbytes) if nbytes else None
            for nbytes in (program.kept_bytes, program.own_bytes)
        )
        return program.memory(inputs, result, kept, own)


CASES = [
    pytest.param(all_reduce(50, DType.FLOAT32, ReduceOp.SUM), id="sum"),
    pytest.param(all_reduce(50, DType.BFLOAT16, ReduceOp.MEAN), id="mean of halves"),
    pytest.param(Fingerprint(Kind.ALL_GATHER, None, DType.INT16, (50,), -1, AUTO), id="gathering"),
    pytest.param(Fingerprint(Kind.BROADCAST, None, DType.INT16, (99,), 1, AUTO), id="broadcast"),
]


@pytest.mark.parametrize("fingerprint", CASES)
def test_the_place_of_a_chunk_has_its_bytes(nodes: NodesOfALane, fingerprint: Fingerprint) -> None:
    for program in nodes.programs(fingerprint):
        files = InFiles()
        memory = files.memory(program)
        sends = list(program.begin(memory))
        for start in sorted({start for _, start in program.expected if program.is_folded(start)}):
            stop = program.expected[program.others[0], start]
            operand = bytearray(program.nbytes(start, stop))
            sends += program.fold(memory, start, dict.fromkeys(program.others, operand))
        for _, _, payload, place in sends:
            if place is not None:
                file, at = place
                assert files.files[file.serial][at : at + len(payload)].tolist() == [*payload]


def test_what_is_sent_at_once_is_read_where_it_lies_unless_others_may_need_it_for_too_long(
    nodes: NodesOfALane, strategy: str
) -> None:
    """With the direct strategy, all that a node needs may come before others have read its own.

    Then its rank uses its memory again; the agent's own is kept.
    """
    for fingerprint in (case.values[0] for case in CASES):
        assert isinstance(fingerprint, Fingerprint)
        is_direct_sum = fingerprint.kind.reduces and strategy == "direct"
        for program in nodes.programs(fingerprint):
            sends = program.begin(InFiles().memory(program))
            places = [place for _, _, payload, place in sends if payload]
            is_in_the_way = is_direct_sum and not program.own_bytes
            assert all((place is None) is is_in_the_way for place in places)
