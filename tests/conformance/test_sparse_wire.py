"""The sparse wire: a 64th of the elements travels, the same bits on all ranks, nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allfold_core.dtypes import Wire
from allfold_core.errors import InvalidArgument
from allfold_core.operations import Kind
from allfold_core.schedules.registry import strategies_for
from tests.conformance import programs, sparse_programs, wire_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.conformance.test_traffic import await_lane, edges, moved
from tests.support.processes.ranks import Job, RankPool, failures
from tests.support.processes.services import Services
from tests.support.tiers import long

BLOCK = Wire.TOPK.block


@pytest.fixture(scope="module", params=[long("1x3"), long("3x1"), "1+2+3"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        yield job


def test_what_all_calls_deliver_is_exactly_what_all_ranks_have_brought(job: Job) -> None:
    """Of each 40 elements of an owner one travels, as it is: whole numbers are bfloat16."""
    numel, calls = 40 * max(1, len(job.node_names)), 5
    found = job.run(sparse_programs.drained, numel=numel, calls=calls, most=400)
    assert found == [found[0]] * job.world_size, "the same bits on all ranks"
    is_exact, called, _ = found[0]
    assert is_exact
    assert (called == calls + 1) == (len(job.node_names) == 1), "one node alone sends nothing"


@pytest.mark.parametrize("in_rounds", [False, True], ids=["all_reduce", "round"])
def test_the_mean_of_many_results_converges_to_the_mean(job: Job, in_rounds: bool) -> None:
    times = (30, 100, 250)
    found = job.run(
        sparse_programs.mean_of_means, numel=1500, times=times, in_rounds=in_rounds, seconds=60
    )
    assert found == [found[0]] * job.world_size, "the same bits on all ranks"
    first, second, third = found[0][0]
    if len(job.node_names) == 1:
        assert third < 1e-6
    else:
        assert third < 0.6 * second < 0.36 * first
        assert third < 0.3


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_reduction_gives_a_64th_of_each_block_of_each_owner(job: Job, dtype: str) -> None:
    """Of a reduce and a reduce-scatter the owner is the one that wants it, so it keeps all."""
    nodes, world = len(job.node_names), job.world_size
    numel = 2 * world * nodes * BLOCK
    [count, *counts], digests = zip(
        *job.run(sparse_programs.reduced, kind="all_reduce", dtype=dtype, numel=numel), strict=True
    )
    assert set(counts) == {count}
    assert len(set(digests)) == 1
    if nodes == 1:
        assert count > numel // 2
    else:
        assert numel // 65 < count <= numel // 64
    for kind in ("reduce", "reduce_scatter"):
        got = job.run(sparse_programs.reduced, kind=kind, dtype=dtype, numel=numel)
        owned = [got[1]] if kind == "reduce" else got
        share = numel if kind == "reduce" else numel // world
        assert all(count > share // 2 for count, _ in owned)


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_the_bytes_of_a_node_are_twice_those_of_the_format_and_no_more_with_more_nodes(
    pool: RankPool, services: Services, nodes: int
) -> None:
    """Its slice comes from all others and goes to them: 2 (P - 1) / P of the tensor's code."""
    numel = nodes * 10 * BLOCK
    with pool.job(range(nodes), timeout=OP_SECONDS) as job:
        await_lane(services, job)
        for calls in (1, 2):
            job.run(programs.call, shape=[numel], wire="topk", feedback="counted")
            each = calls * 2 * (nodes - 1) * 10 * 118
            sent = moved(services, job, nodes * each)
            assert dict.fromkeys(job.node_names, 0) | _totals(sent) == dict.fromkeys(
                job.node_names, each
            )
        assert edges(services, job, "out") == edges(services, job, "in")


def _totals(sent: dict[tuple[str, str], int]) -> dict[str, int]:
    nodes = {source for source, _ in sent}
    return {node: sum(sent[edge] for edge in sent if edge[0] == node) for node in nodes}


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "topk"},
        {"wire": "topk", "feedback": "a", "op": "max"},
        {"wire": "topk", "feedback": "a", "op": "product"},
    ],
)
def test_it_is_refused_for_what_it_would_spoil(job: Job, options: dict[str, Any]) -> None:
    why = "wire='topk' is for sums and means with feedback='name'"
    for call in job.start_all(wire_programs.call, **options):
        error = call.failure().error
        assert isinstance(error, InvalidArgument)
        assert why in error.message
    for kind in ("broadcast", "all_gather", "gather", "scatter", "all_to_all"):
        for call in job.start_all(sparse_programs.moved, kind=kind):
            error = call.failure().error
            assert isinstance(error, InvalidArgument)
            assert why in error.message
    assert job.run(programs.call) == [[sum(range(1, job.world_size + 1))] * 4] * job.world_size


def test_a_strategy_that_sends_on_partial_sums_or_whole_tensors_is_refused(job: Job) -> None:
    for strategy in {*strategies_for(Kind.ALL_REDUCE)} - {"direct2"}:
        calls = job.start_all(wire_programs.call, strategy=strategy, wire="topk", feedback="a")
        for failure in failures(calls):
            assert isinstance(failure.error, InvalidArgument)
            assert "cannot run all_reduce with wire='topk'" in failure.error.message
