"""Calls are in order with what streams are given, and nobody waits for a GPU that need not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda import loss_programs, programs
from tests.cuda.conftest import machine
from tests.support.processes.ranks import RankPool


@pytest.fixture(scope="module")
def slow() -> Iterator[RankPool]:
    """A GPU on which everything takes long."""
    with machine(delay_us=60_000) as pool:
        yield pool


EACH = pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 1, 1)], ids=str)


@EACH
def test_a_call_is_in_order_with_the_work_of_its_tensors_stream(
    pool: RankPool, nodes: tuple[int, ...]
) -> None:
    with pool.job(nodes) as job:
        for numel in (10, 100_000):
            found = job.run(programs.behind_other_work, numel=numel)
            assert found == [[]] * len(nodes)


@pytest.mark.long
@EACH
def test_ops_that_are_in_flight_together_keep_their_memory_apart(
    pool: RankPool, nodes: tuple[int, ...]
) -> None:
    with pool.job(nodes) as job:
        found = job.run(programs.many_at_once, numel=300_000, count=40)
        assert found == [[]] * len(nodes)


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=str)
def test_new_arrays_have_memory_that_nothing_is_on_its_way_to(
    slow: RankPool, nodes: tuple[int, ...], fails: bool
) -> None:
    with slow.job(nodes) as job:
        assert job.run(loss_programs.memory_after, numel=1 << 16, fails=fails) == [[], []]


@EACH
def test_each_op_sees_what_the_one_before_it_left(pool: RankPool, nodes: tuple[int, ...]) -> None:
    with pool.job(nodes) as job:
        assert job.run(programs.chain, numel=70_000, steps=10) == [[]] * len(nodes)


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=str)
def test_a_gpu_that_is_late_for_one_op_fails_that_one_for_all(
    slow: RankPool, nodes: tuple[int, ...]
) -> None:
    with slow.job(nodes) as job:
        first, second = job.run(loss_programs.late_for_one)
        assert first == second, "the ranks have different outcomes"
        assert [first[0], first[2]] == ["done", "done"]
        assert first[1].startswith("PeerMissing: op 1 of group")
        assert "the GPU of rank 0 on node node0 is busy" in first[1]
