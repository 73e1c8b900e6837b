"""Work on a tensor of a GPU before a call and after ``wait`` is in order, on any stream.

And the host waits for as little as possible: not for the GPU, unless the path is ``host``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import stream_programs as programs
from tests.gpu import training_programs
from tests.gpu.conftest import OP_SECONDS, PROGRAM_SECONDS, SHAPES, TEST_SECONDS
from tests.support.processes.ranks import Job, Program, RankPool
from tests.torch_backend.conftest import TorchJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]


def run(job: Job, program: Program, **arguments: Any) -> list[Any]:
    return job.run(program, device="cuda", seconds=PROGRAM_SECONDS, **arguments)


def total(job: Job) -> float:
    return float(sum(range(1, job.world_size + 1)))


@pytest.mark.parametrize("arena", [False, True])
@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_an_op_is_in_order_on_the_stream_of_its_caller(
    pool: RankPool, path: str, shape: str, arena: bool
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        assert run(job, programs.warm) == [[float(job.world_size)] * 2] * job.world_size
        for found in run(job, programs.on_a_side_stream, arena=arena):
            assert found["result"] == [2 * total(job)] * 2
            assert found["path"] == path
            assert found["call waited"] == (path == "host")
            # In the arena that the agent has open there is nothing to copy, and so to wait for.
            if path != "host" and not (arena and path == "ipc"):
                assert not found["wait waited"]


@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_whoever_waits_sees_the_result_on_the_stream_that_is_current_then(
    pool: RankPool, path: str, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        gathered = [float(rank) for rank in range(job.world_size) for _ in range(3)]
        for found in run(job, programs.waited_for_elsewhere):
            for where in ("there", "elsewhere"):
                assert found[where] == [total(job)] * 2
                assert found[f"new, {where}"] == gathered


@pytest.mark.parametrize("arena", [False, True])
def test_memory_of_a_dropped_result_is_reused_after_the_last_copy(
    pool: RankPool, path: str, arena: bool
) -> None:
    with pool.job(SHAPES["1x2"], timeout=OP_SECONDS) as job:
        run(job, programs.warm)
        for found in run(job, programs.memory_of_a_result, arena=arena):
            assert found["others"] == [[programs.OTHER] * 2] * 4


def test_memory_of_a_dropped_input_is_reused_after_it_was_read(pool: RankPool, path: str) -> None:
    with pool.job(SHAPES["1x2"], timeout=OP_SECONDS) as job:
        assert run(job, programs.memory_of_an_input) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("shape", ["1x2", "2x1"])
def test_what_is_received_comes_after_the_work_of_the_callers_stream(
    pool: RankPool, path: str, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        assert run(job, programs.received_behind_other_work) == [[programs.OTHER] * 2] * 2


@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_ops_that_nobody_waits_for_disturb_no_others(pool: RankPool, path: str, shape: str) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        world = float(job.world_size)
        for found in run(job, programs.nobody_waits):
            assert found == {"late": [world] * 2, "kept": [world] * 2}


def test_ops_of_several_streams_are_in_flight_at_once(pool: RankPool, path: str) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        for found in run(job, programs.many_in_flight):
            assert found == [[4.0 * number + 6] * 2 for number in range(len(found))]


@pytest.mark.parametrize("arena", [False, True])
def test_one_op_follows_the_other_on_the_same_tensor(
    pool: RankPool, path: str, arena: bool
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        assert run(job, programs.chained, arena=arena) == [[6.0] * 2] * 4


def test_futures_are_in_order_on_the_stream_that_is_current(two_nodes: TorchJob, path: str) -> None:
    found = two_nodes.run(training_programs.futures, device="cuda")
    assert found == [[10.0, 30.0, 30.0]] * 4
