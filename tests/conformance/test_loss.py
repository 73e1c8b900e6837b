"""Ranks and agents that die or leave: everyone who is left is told who it was, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from allfold_core.errors import AgentLost, AllfoldError, Evicted, PeerLost
from tests.conformance import programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes import rank_worker
from tests.support.processes.ranks import (
    Call,
    Failure,
    Job,
    RankPool,
    await_called,
    failures,
    results,
)
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

# Generous, because the machine may be busy; what was measured is printed.
SECONDS = 5.0


def survivors(job: Job, *gone: int) -> list[int]:
    return [rank for rank in range(job.world_size) if rank not in gone]


def lost(found: list[Failure], ranks: list[int], node: str) -> None:
    """All failures are a loss of the same ranks, told in the same words."""
    assert len({str(failure.error) for failure in found}) == 1, [str(each) for each in found]
    error = found[0].error
    assert isinstance(error, PeerLost), str(error)
    assert error.details["ranks"] == ranks, str(error)
    assert node in error.message
    for rank in ranks:
        assert str(rank) in error.message


def told_within(found: list[Failure], since: float) -> None:
    took = max(failure.ended for failure in found) - since
    print(f"{took * 1000:.0f} ms after the loss")
    assert took < SECONDS


def fail_at_once(
    job: Job, ranks: Sequence[int], error: type[AllfoldError] = PeerLost, **options: Any
) -> None:
    """Check that calls fail without waiting for the op's deadline."""
    for failure in failures([job.start(rank, programs.call, **options) for rank in ranks]):
        assert type(failure.error) is error, str(failure)
        assert failure.seconds < SECONDS


def works(job: Job) -> None:
    go_on(job, range(job.world_size))


def go_on(job: Job, ranks: Sequence[int]) -> None:
    """Check that those who are left do an op, each with its new number."""
    total = sum(range(1, len(ranks) + 1))
    calls = [job.start(rank, programs.call) for rank in ranks]
    assert results(calls) == [[total] * 4] * len(ranks)


def streaming(job: Job, services: Services) -> None:
    """Return once a stream of ops is under way: amid one of them, or between two."""
    node = job.nodes[0]
    wait_until(lambda: len(services.ops(node, job.name, job.opening)) >= 20, "ops are done", 30.0)


def call_all(job: Job, ranks: list[int], services: Services) -> list[Call]:
    """Ranks call an op; returns when their agents have got the calls."""
    seq = job.start(ranks[0], programs.counted).result()
    calls = [job.start(rank, programs.call) for rank in ranks]
    for rank in ranks:
        await_called(services, job, seq, rank)
    return calls


def await_epoch(services: Services, job: Job, node: str, ordinal: int) -> None:
    """Wait until a node has taken in an epoch of the job's group."""
    wait_until(
        lambda: services.group_status(node, job.name)["epoch"] >= ordinal,
        f"{node} is in epoch {ordinal}",
    )


# A rank dies


@pytest.mark.parametrize("shape", ["1x3", "2x2", "3x1"])
@pytest.mark.parametrize("warm", [True, False], ids=["later", "in the first op"])
def test_a_rank_that_is_killed_fails_the_pending_op_of_all_others_and_is_named(
    pool: RankPool, services: Services, shape: str, warm: bool
) -> None:
    for victim in (0, len(SHAPES[shape]) - 1):
        with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
            if warm:
                works(job)
            left = survivors(job, victim)
            calls = call_all(job, left, services)
            killed = time.monotonic()
            job.ranks[victim].kill()
            found = failures(calls)
            lost(found, [victim], job.nodes[victim])
            told_within(found, killed)
            go_on(job, left)


def test_a_rank_that_is_killed_is_lost_at_once_though_a_child_holds_its_socket_open(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)
        child = job.start(1, programs.leave_socket_to_a_child).result()
        try:
            calls = call_all(job, survivors(job, 1), services)
            killed = time.monotonic()
            job.ranks[1].kill()
            found = failures(calls)
        finally:
            os.kill(child, signal.SIGKILL)
        lost(found, [1], job.nodes[1])
        told_within(found, killed)


def test_a_rank_that_is_killed_while_it_waits_itself_is_named_too(
    pool: RankPool, services: Services
) -> None:
    """Also to the one that has not called yet, for whom all the others have waited."""
    with pool.job(SHAPES["1x3"], timeout=OP_SECONDS) as job:
        works(job)
        late, victim = 1, 0
        calls = call_all(job, survivors(job, late), services)
        job.ranks[victim].kill()
        found = failures(calls[1:])
        found.append(job.start(late, programs.call).failure())
        lost(found, [victim], job.nodes[victim])
        go_on(job, survivors(job, victim))


@pytest.mark.parametrize("shape", ["2x2", "3x1"])
def test_an_op_that_has_begun_goes_on_with_the_input_of_a_rank_that_is_killed_after_its_call(
    pool: RankPool, services: Services, shape: str
) -> None:
    """The loss is told by the next op, to all who are left."""
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        works(job)
        late, victim = 1, 0
        calls = call_all(job, survivors(job, late), services)
        job.ranks[victim].kill()
        await_epoch(services, job, job.nodes[victim], 1)
        calls[0] = job.start(late, programs.call)
        total = sum(range(1, job.world_size + 1))
        assert results(calls) == [[total] * 4] * len(calls)
        left = survivors(job, victim)
        lost(failures([job.start(rank, programs.call) for rank in left]), [victim], "node0")
        go_on(job, left)


def test_a_rank_that_is_killed_between_ops_fails_the_next_one(pool: RankPool) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)
        job.ranks[3].kill()
        lost(failures([job.start(rank, programs.call) for rank in (0, 1, 2)]), [3], "node1")
        go_on(job, [0, 1, 2])


@pytest.mark.parametrize("shape", ["1x3", "2x2", "3x1"])
def test_a_rank_that_is_killed_amid_a_stream_of_large_ops_fails_them(
    pool: RankPool, services: Services, shape: str
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        calls = job.start_all(programs.stream, numel=1_000_000, seconds=60.0)
        streaming(job, services)
        job.ranks[1].kill()
        lost(failures([calls[rank] for rank in survivors(job, 1)]), [1], job.nodes[1])


def test_after_a_loss_the_same_name_can_be_registered_with_other_counts(
    pool: RankPool,
) -> None:
    for nodes in ([0, 0, 1], [0, 1], [1, 0, 0, 2]):
        with pool.job(nodes, "phoenix", timeout=OP_SECONDS) as job:
            works(job)
            job.ranks[-1].kill()
            left = survivors(job, job.world_size - 1)
            lost(
                failures([job.start(rank, programs.call) for rank in left]),
                [job.world_size - 1],
                job.nodes[-1],
            )


# A rank leaves


@pytest.mark.parametrize("shape", ["1x3", "2x2", "3x1"])
def test_a_rank_that_leaves_while_others_wait_for_it_fails_their_op(
    pool: RankPool, services: Services, shape: str
) -> None:
    for leaver in (0, len(SHAPES[shape]) - 1):
        with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
            works(job)
            left = survivors(job, leaver)
            calls = call_all(job, left, services)
            job.ranks[leaver].run(rank_worker.close_group, name=job.name)
            found = failures(calls)
            lost(found, [leaver], "left the group")
            go_on(job, left)


def test_a_rank_that_leaves_waits_for_its_own_ops_first(pool: RankPool) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        leaving = job.start(0, programs.leave_with_an_op_in_flight)
        others = [job.start(rank, programs.call, delay=0.3) for rank in (1, 2, 3)]
        assert leaving.result() == [10.0] * 4
        assert [call.result() for call in others] == [[10.0] * 4] * 3


def test_ranks_may_leave_as_soon_as_they_have_their_result(pool: RankPool) -> None:
    """The last frames of a group reach slower nodes although the sender's ranks are gone."""
    for _ in range(5):
        with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
            assert job.run(programs.large_op_and_leave, numel=500_000) == [True] * 3


# An agent dies


def test_an_agent_that_is_killed_is_named_and_its_own_ranks_lose_their_agent(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        works(job)
        calls = call_all(job, [1, 2, 3], services)
        killed = time.monotonic()
        services.kill_agent("node1")
        found = failures(calls)
        told_within(found, killed)
        lost(found[:1], [2, 3], "node1")
        assert [type(failure.error) for failure in found[1:]] == [AgentLost] * 2
        fail_at_once(job, [0])  # which has yet to call that op
        go_on(job, [0, 1])
        fail_at_once(job, [2, 3], AgentLost)
    services.start_agents("node1")
    with pool.job(SHAPES["2x2"], job.name, timeout=OP_SECONDS) as job:
        works(job)


def test_without_an_agent_init_can_be_called_again_as_the_error_says(
    pool: RankPool, services: Services
) -> None:
    with pool.job([3, 3], timeout=OP_SECONDS) as job:
        works(job)
        services.kill_agent("node3")
        # A small op may yet be done by the ranks alone, until they notice that their agent is gone.
        fail_at_once(job, [0, 1], AgentLost, shape=(20_000,))
        services.start_agents("node3")
        job.enter(services, timeout=OP_SECONDS)
        works(job)


def test_an_agent_that_is_killed_before_any_op_is_found_missing_by_the_first_one(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        services.kill_agent("node2")
        calls = [job.start(rank, programs.call) for rank in (0, 1)]
        lost(failures(calls), [2], "node2")


@pytest.mark.parametrize("strategy", ["ring", "centralized"])
def test_an_agent_that_is_killed_amid_a_stream_of_large_ops_fails_them(
    pool: RankPool, services: Services, strategy: str
) -> None:
    """Also the root of a star, through which everything goes."""
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        calls = job.start_all(programs.stream, numel=1_000_000, seconds=60.0, strategy=strategy)
        streaming(job, services)
        killed = time.monotonic()
        services.kill_agent("node0")
        found = failures(calls)
        assert isinstance(found[0].error, AgentLost)
        lost(found[1:], [0], "node0")
        told_within(found, killed)
        go_on(job, [1, 2])


@pytest.mark.parametrize("stopped", ["node0", "node1"])
def test_the_others_go_on_without_an_agent_that_hangs_and_its_rank_hears_so_when_it_is_back(
    pool: RankPool, services: Services, stopped: str
) -> None:
    """Also when it is the first one, which leads the rounds. No op's deadline is waited for."""
    with pool.job(SHAPES["3x1"], timeout=OP_SECONDS) as job:
        works(job)
        agent, left = services.agents[stopped].pid, survivors(job, job.nodes.index(stopped))
        os.kill(agent, signal.SIGSTOP)
        since = time.monotonic()
        try:
            found = failures([job.start(rank, programs.call) for rank in left])
            go_on(job, left)
        finally:
            os.kill(agent, signal.SIGCONT)
        told_within(found, since)
        lost(found, [job.nodes.index(stopped)], stopped)
        fail_at_once(job, [job.nodes.index(stopped)], Evicted)
    services.await_all_registered()
    with pool.job(SHAPES["3x1"], job.name, timeout=OP_SECONDS) as job:
        works(job)
