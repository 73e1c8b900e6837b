"""Collectives of tensors on a GPU have the results that they have everywhere."""

from __future__ import annotations

import pytest
from tests.support import cuda_programs as programs
from tests.support.ranks import RankPool

ONE_AGENT = [(0, 0), (0, 0, 0, 0)]
TWO_AGENTS = [(0, 1), (0, 0, 1, 1)]
EACH = pytest.mark.parametrize("nodes", ONE_AGENT + TWO_AGENTS, ids=lambda nodes: str(nodes))

FLOATS = ("float32", "float64", "float16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
CASES = [
    *((dtype, op) for dtype in FLOATS + INTEGERS for op in ("sum", "product", "min", "max")),
    *((dtype, "mean") for dtype in FLOATS),
    *((dtype, op) for dtype in INTEGERS for op in ("band", "bor", "bxor")),
    *(("bool", op) for op in ("sum", "max", "band", "bor")),
]
# For all of them: the agent has a kernel compiled for each, twice (NVRTC, and g++ for the fake).
KERNELS_SECONDS = 100.0


@EACH
def test_every_reduction_of_every_dtype_is_exact(pool: RankPool, nodes: tuple[int, ...]) -> None:
    with pool.job(nodes) as job:
        done = job.run(programs.all_reduces, KERNELS_SECONDS, numel=1003, cases=CASES)
        assert done == [[]] * len(nodes)
        assert job.run(programs.premultiplied, numel=1003) == [[]] * len(nodes)


@EACH
@pytest.mark.parametrize("numel", [1, 1000, 300_001])
def test_every_collective_moves_every_element(
    pool: RankPool, nodes: tuple[int, ...], numel: int
) -> None:
    with pool.job(nodes) as job:
        assert job.run(programs.collectives, numel=numel) == [[]] * len(nodes)


@EACH
def test_blocks_may_have_different_sizes(pool: RankPool, nodes: tuple[int, ...]) -> None:
    with pool.job(nodes) as job:
        assert job.run(programs.uneven, numel=5000) == [[]] * len(nodes)


@EACH
def test_messages_arrive_in_their_order(pool: RankPool, nodes: tuple[int, ...]) -> None:
    with pool.job(nodes) as job:
        for numel in (1, 200_000):
            assert job.run(programs.messages, numel=numel) == [[]] * len(nodes)


@EACH
def test_what_lies_in_the_arena_on_the_gpu_is_used_there(
    pool: RankPool, nodes: tuple[int, ...]
) -> None:
    with pool.job(nodes) as job:
        assert job.run(programs.collectives, numel=100_003, place="arena") == [[]] * len(nodes)
        cases = [("float32", "sum"), ("float16", "mean")]
        found = job.run(programs.all_reduces, numel=100_003, cases=cases, place="arena")
        assert found == [[]] * len(nodes)


@EACH
def test_ranks_with_and_without_a_gpu_are_in_one_group(
    pool: RankPool, nodes: tuple[int, ...]
) -> None:
    with pool.job(nodes) as job:
        for program in (programs.collectives, programs.uneven, programs.messages):
            assert job.run(program, numel=70_001, place="mixed") == [[]] * len(nodes)
        cases = [("float32", "mean"), ("float16", "sum"), ("int32", "bxor")]
        found = job.run(programs.all_reduces, numel=70_001, cases=cases, place="mixed")
        assert found == [[]] * len(nodes)


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_lossy_wire_rounds_between_nodes_alone(pool: RankPool, wire: str) -> None:
    with pool.job((0, 0, 1, 1), wire=wire) as job:
        # Whole numbers up to 28 pass in 8 bits of mantissa; int8 has a scale that need not be 1.
        cases = [("float32", "sum")] if wire == "bfloat16" else [("int32", "sum")]
        assert job.run(programs.all_reduces, numel=50_000, cases=cases) == [[]] * 4
