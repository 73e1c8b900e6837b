"""Inputs of local ranks are reduced in place, and the results are exact all the same.

A node with one rank folds that rank's own memory, unless it has to be converted or multiplied
first; a node with several folds theirs into its own memory, and then that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from tests.conformance import collective_programs
from tests.conformance.conftest import OP_SECONDS
from tests.support import reference
from tests.support.cases import digest
from tests.support.processes.ranks import Job, RankPool
from tests.support.reference import Collective

SHAPES: dict[str, tuple[int, ...]] = {
    "2x1": (0, 1),
    "2x2": (0, 0, 1, 1),
    "4x1": (0, 1, 2, 3),
    "4x2": (0, 0, 1, 1, 2, 2, 3, 3),
}
STRATEGIES = ("ring", "direct", "direct2", "halving_doubling", "centralized", "chain")
OPS = ("sum", "mean", "premul_sum", "max")
DTYPES = ("float32", "bfloat16")
PLACES = ("plain", "arena", "strided")
LONG = 1_200_003  # slices of several chunks, also of four nodes


@pytest.fixture(scope="module", params=SHAPES)
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def check(job: Job, cases: Sequence[Collective]) -> None:
    """Run the cases on all ranks and compare every result with the reference, bit for bit."""
    rows = [case.message for case in cases]
    got = job.run(collective_programs.run, rows=rows, seconds=60)
    for number, case in enumerate(cases):
        right = [digest(each) for each in reference.results(case, job.world_size)]
        assert [rank[number][0] for rank in got] == right, case


def all_reduce(numel: int, op: str, dtype: str, strategy: str, place: str) -> Collective:
    # numpy has no bfloat16
    return Collective(
        "all_reduce",
        [numel],
        dtype=dtype,
        op=op,
        strategy=strategy,
        place=place,
        torch=dtype == "bfloat16",
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_fold_of_converted_multiplied_and_plain_inputs_is_exact(
    job: Job, strategy: str
) -> None:
    sizes = (len(set(job.nodes)), 1009)
    check(
        job,
        [
            all_reduce(numel, op, dtype, strategy, place)
            for numel, op, dtype, place in product(sizes, OPS, DTYPES, PLACES)
        ],
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_of_several_chunks_are_folded_where_they_lie(job: Job, strategy: str) -> None:
    folds = [("sum", "float32"), ("premul_sum", "bfloat16")]
    check(
        job,
        [
            all_reduce(LONG, op, dtype, strategy, place)
            for (op, dtype), place in product(folds, ("plain", "arena"))
        ],
    )


@pytest.mark.parametrize("strategy", ["ring", "direct", "halving_doubling", "centralized"])
def test_blocks_of_several_ranks_in_one_fold_are_exact_and_inputs_stay(
    job: Job, strategy: str
) -> None:
    """A node's slice has a block of each of its ranks. Results lie apart from what was brought."""
    uneven = [100 + 7 * rank for rank in range(job.world_size)]
    check(
        job,
        [
            Collective("reduce_scatter", rows, dtype=dtype, op=op, strategy=strategy, place=place)
            for rows, (op, dtype), place in product(
                ([64] * job.world_size, uneven),
                [("sum", "float32"), ("mean", "float32"), ("premul_sum", "float16")],
                PLACES,
            )
        ],
    )
