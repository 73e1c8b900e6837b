"""Whatever dies or hangs, there is an outcome, and the agent lives on."""

from __future__ import annotations

import pytest

from allfold_core.errors import PeerLost
from tests.cuda import loss_programs, programs
from tests.cuda.conftest import machine
from tests.support.processes.ranks import Call, RankPool
from tests.support.waiting import wait_until

CASES = [("float32", "sum")]


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("numel", [10, 3_000_000])
def test_a_rank_may_die_while_the_agent_has_its_memory_open(
    pool: RankPool, nodes: tuple[int, ...], numel: int
) -> None:
    """Its op waits for the last rank, which calls when the other one is dead.

    All have the exact result, if it had called before, or all hear of the loss.
    """
    with pool.unregistered(nodes) as job:
        job.enter(pool.services)
        assert job.run(programs.all_reduces, numel=10, cases=CASES) == [[]] * len(nodes)
        *between, last = range(1, len(nodes))
        calls = [
            job.start(rank, programs.all_reduces, numel=numel, cases=CASES) for rank in between
        ]
        job.start(0, loss_programs.die_in_flight, numel=numel)
        wait_until(lambda: job.ranks[0].ended, "the rank is dead")
        calls.append(job.start(last, programs.all_reduces, numel=numel, cases=CASES))
        found = [outcome(call) for call in calls]
        assert found in ([[]] * len(calls), [(PeerLost.code, [0])] * len(calls))
    with pool.job(nodes) as job:
        assert job.run(programs.collectives, numel=1000) == [[]] * len(nodes)


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("numel", [10, 3_000_000])
def test_an_op_that_a_rank_dies_in_has_one_outcome_for_the_others(
    pool: RankPool, nodes: tuple[int, ...], numel: int
) -> None:
    """All have the exact result, or all hear of the loss; the rank dies at any point of the op."""
    with pool.unregistered(nodes) as job:
        job.enter(pool.services)
        others = [
            job.start(rank, programs.all_reduces, numel=numel, cases=CASES)
            for rank in range(1, len(nodes))
        ]
        job.start(0, loss_programs.die_in_flight, numel=numel)
        found = [outcome(call) for call in others]
        wait_until(lambda: job.ranks[0].ended, "the rank is dead")
        assert found in ([[]] * len(others), [(PeerLost.code, [0])] * len(others))


def outcome(call: Call) -> object:
    """Return the program's result; or the code of its error, and the ranks that are lost."""
    answer = call.answer()
    if "result" in answer:
        return answer["result"]
    error = call.failure().error
    return error.code, error.details.get("ranks")


def test_a_rank_whose_gpu_does_nothing_any_more_is_named_when_the_time_is_over() -> None:
    variables = {"ALLFOLD_GPU_PATH": "pinned"}
    with machine(variables, hang_device_after=0) as pool, pool.unregistered((0, 0)) as job:
        job.enter(pool.services)
        for rank, said in enumerate(job.run(loss_programs.hang, timeout=1.0)):
            assert said.startswith("PeerMissing: op 0 of group")
            assert "timed out after its timeout of 1 s" in said
            assert f"the GPU of rank {rank} on node node0 is busy with what it was given" in said
        for each in job.ranks:  # which would wait for its GPU
            each.kill()


@pytest.mark.long
def test_an_agent_whose_gpu_does_nothing_any_more_says_so_when_the_time_is_over() -> None:
    """Others are served: releasing the memory of ranks that end would mean to wait forever."""
    variables = {"FAKE_CUDA_HANG_DEVICE_AFTER": "12", "FAKE_CUDA_RELEASE_WAITS": "1"}
    with machine(agent_variables=variables) as pool, pool.unregistered((0, 0)) as job:
        job.enter(pool.services)
        assert job.run(loss_programs.keep_array) == [True, True]  # which no op uses
        for _ in range(10):  # the proofs of four segments, and some ops
            said = job.run(loss_programs.hang, timeout=1.0)
            if said != ["done", "done"]:
                break
        for each in said:
            assert "Fake GPU 0 is stuck" in each
        for rank in job.ranks:
            rank.kill()
        with pool.job((0, 0)) as others:
            assert others.run(programs.collectives, numel=1000, place="cpu") == [[]] * 2
