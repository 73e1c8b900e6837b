"""Collectives of tensors on a GPU have the results that they have everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda import programs
from tests.support.processes.ranks import RankPool

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


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("wire", "given", "rounded"),
    [
        # bfloat16 has 8 bits of mantissa, so 257 is 256 in it.
        ("bfloat16", [[257.0, 256.0], [-1.0, 1.0]], [256.0, 256.0]),
        # 127, or 7, makes the scale of its block 1, so 0.6 is 1 in it, and 0.3 would be 0.
        ("int8", [[127.0, 0.3], [0.0, 0.3]], [127.0, 1.0]),
        ("int4", [[7.0, 0.3], [0.0, 0.3]], [7.0, 1.0]),
    ],
)
def test_a_lossy_wire_rounds_what_ranks_of_a_node_bring_together_and_only_between_nodes(
    pool: RankPool, wire: str, given: list[list[float]], rounded: list[float]
) -> None:
    """With each rank's values rounded, there would be 255 and 0 instead of 256 and 1."""
    exact = np.array(given, np.float32).sum(axis=0).tolist()
    everybody = [*given, [0.0, 0.0], [0.0, 0.0]]
    for nodes, expected in (((0, 0, 1, 1), rounded), ((0, 0, 0, 0), exact)):
        with pool.job(nodes, wire=wire) as job:
            found = job.run(programs.sum_of_pairs, numel=50_000, given=everybody)
            assert found == [[expected]] * 4
