"""Ranks and agents that die while GPUs are busy; and GPUs that are busy for too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from allfold_core.errors import AgentLost, PeerLost, PeerMissing
from tests.gpu import loss_programs as programs
from tests.gpu.conftest import OP_SECONDS, PROGRAM_SECONDS, SHAPES, TEST_SECONDS
from tests.support.processes.ranks import Call, Failure, Job, RankPool, await_called, failures
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(TEST_SECONDS)]

# On the path "host" a call waits for the GPU, so nothing can happen between.
in_order_on_the_gpu = pytest.mark.parametrize(
    "path", ["ipc", "pinned"], indirect=True, scope="session"
)
BUSY_SECONDS = 1.5
# Far less than the ops' own deadline; generous, because the machine may be busy.
TOLD_SECONDS = 10.0
WAIT_SECONDS = 30.0
SHORT_SECONDS = 1.5
TOO_LONG_SECONDS = 4.0
# Ranks that end give the GPU back what their contexts took, too: some 500 MiB each. What is shared
# has to be so much more that it is missed.
LARGE_MIB = 4096
SLACK_MIB = 256


def works(job: Job) -> None:
    total = float(sum(range(1, job.world_size + 1)))
    got = job.run(programs.all_reduce, device="cuda", seconds=PROGRAM_SECONDS)
    assert got == [[total] * 2] * job.world_size


def call(job: Job, ranks: Sequence[int], services: Services, seq: int) -> list[Call]:
    """Ranks call the op of this number; returns when their agents have got the calls."""
    calls = [job.start(rank, programs.all_reduce, device="cuda") for rank in ranks]
    for rank in ranks:
        await_called(services, job, seq, rank)
    return calls


def call_behind_work(job: Job, rank: int, folder: Path) -> Call:
    """A rank calls an op that its GPU comes to a while later; returns when it has called."""
    note = folder / f"{job.name}.{rank}"
    calling = job.start(rank, programs.all_reduce, device="cuda", busy=BUSY_SECONDS, note=str(note))
    wait_until(note.exists, f"rank {rank} has called", WAIT_SECONDS)
    return calling


def told_within(found: list[Failure], since: float) -> None:
    took = max(failure.ended for failure in found) - since
    print(f"{took * 1000:.0f} ms after the loss")
    assert took < TOLD_SECONDS


def agents_live(services: Services) -> bool:
    return not any(agent.child.ended for agent in services.agents.values())


@in_order_on_the_gpu
@pytest.mark.parametrize("shape", ["1x4", "2x2"])
def test_a_rank_that_is_killed_while_its_gpu_is_busy_is_named(
    pool: RankPool, services: Services, path: str, shape: str, tmp_path: Path
) -> None:
    victim = 1
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)
        calls = call(job, [0, 2, 3], services, seq=1)
        call_behind_work(job, victim, tmp_path)
        killed = time.monotonic()
        job.ranks[victim].kill()
        found = failures(calls, WAIT_SECONDS)
        for failure in found:
            assert isinstance(failure.error, PeerLost), str(failure)
            assert failure.error.details["ranks"] == [victim], str(failure)
        told_within(found, killed)
        assert agents_live(services)
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)


@in_order_on_the_gpu
def test_a_rank_that_is_killed_amid_many_ops_costs_only_its_group(
    pool: RankPool, services: Services, path: str
) -> None:
    """The agent may be folding its memory at that moment."""
    with (
        pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as other,
        pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job,
    ):
        works(other)
        works(job)
        calls = job.start_all(programs.for_ever, device="cuda")
        wait_until(
            lambda: len(services.ops("node0", job.name, job.opening)) > 5,
            "ops are done",
            WAIT_SECONDS,
        )
        job.ranks[2].kill()
        for failure in failures([calls[rank] for rank in (0, 1, 3)], WAIT_SECONDS):
            assert isinstance(failure.error, PeerLost), str(failure)
            assert failure.error.details["ranks"] == [2], str(failure)
        assert agents_live(services)
        works(other)


@pytest.mark.parametrize("path", ["ipc"], indirect=True, scope="session")
def test_the_memory_of_ranks_that_are_killed_is_free_again(pool: RankPool, path: str) -> None:
    with pool.unregistered([0]) as beside:
        (observer,) = beside.ranks

        def free_mib() -> int:
            return int(observer.start(programs.free_mib).result(PROGRAM_SECONDS))

        with pool.job(SHAPES["1x2"], timeout=OP_SECONDS) as job:
            works(job)
            before = free_mib()
            job.run(programs.share, device="cuda", mib=LARGE_MIB, seconds=PROGRAM_SECONDS)
            assert free_mib() < before - 2 * LARGE_MIB + SLACK_MIB
            for rank in job.ranks:
                rank.kill()
        wait_until(
            lambda: free_mib() > before - SLACK_MIB, "the agent has let go of it", WAIT_SECONDS
        )


@in_order_on_the_gpu
def test_an_agent_that_is_killed_is_named_and_its_ranks_lose_it(
    pool: RankPool, services: Services, path: str, tmp_path: Path
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)
        calls = call(job, [0, 1], services, seq=1)
        calls.append(call_behind_work(job, 2, tmp_path))
        killed = time.monotonic()
        services.kill_agent("node1")
        found = failures(calls, WAIT_SECONDS)
        told_within(found, killed)
        assert [type(failure.error) for failure in found] == [PeerLost, PeerLost, AgentLost]
        assert all("node1" in failure.error.message for failure in found[:2])
        late = job.start(3, programs.all_reduce, device="cuda").failure()
        assert isinstance(late.error, AgentLost), str(late)
    services.restart_dead_agents()
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)


@pytest.mark.parametrize("shape", ["1x2", "2x2"])
def test_a_gpu_that_is_busy_for_longer_than_the_timeout_is_named(
    pool: RankPool, path: str, shape: str
) -> None:
    late = 1
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)
        calls = [
            job.start(
                rank,
                programs.all_reduce,
                device="cuda",
                busy=TOO_LONG_SECONDS if rank == late else 0.0,
                timeout=SHORT_SECONDS,
            )
            for rank in range(job.world_size)
        ]
        for failure in failures(calls, WAIT_SECONDS):
            assert isinstance(failure.error, PeerMissing), str(failure)
            assert failure.error.details["missing_ranks"] == [late], str(failure)
            assert f"rank {late}" in failure.error.message
        works(job)
