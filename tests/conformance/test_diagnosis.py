"""The culprit is named: at the orchestrator, on every node, in logs and errors, in one sentence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.conformance import diagnosis_programs, programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes import rank_worker
from tests.support.processes.ranks import Job, RankPool, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

Json = dict[str, Any]
# Longer than it takes to name somebody, also on a machine that is busy with other tests.
KNOWN_SECONDS = 20.0


@pytest.fixture(scope="module", params=["1x3", "2x2", "3x1"])
def shared_job(request: pytest.FixtureRequest, pool: RankPool) -> Iterator[Job]:
    with pool.job(SHAPES[request.param], timeout=OP_SECONDS) as job:
        job.run(diagnosis_programs.all_reduce)
        yield job


def incidents(services: Services, job: Job) -> list[Json]:
    """Return what the orchestrator knows of a group."""
    found = services.get(f"{services.orchestrator_url}/v1/incidents?limit=512")["incidents"]
    return [each for each in found if each["group"] == job.name]


def await_incident(services: Services, job: Job, cause: str, after: float) -> Json:
    """Return the first incident of a cause that was found after a time, once there is one."""
    found: list[Json] = []

    def is_known() -> bool:
        found[:] = [
            each
            for each in incidents(services, job)
            if each["cause"] == cause and each["seen"] >= after
        ]
        return bool(found)

    wait_until(is_known, f"an incident of cause {cause}", KNOWN_SECONDS)
    return found[-1]


def await_end(services: Services, job: Job, incident: Json) -> None:
    def is_over() -> bool:
        known = {each["id"]: each for each in incidents(services, job)}
        return known[incident["id"]]["ended"] is not None

    wait_until(is_over, "the incident is over", KNOWN_SECONDS)


def rank_culprit(job: Job, rank: int) -> Json:
    return {"kind": "rank", "node": job.nodes[rank], "rank": rank, "to": ""}


def test_a_late_rank_is_named_in_one_sentence_by_all_and_with_what_it_does(
    job: Job, services: Services
) -> None:
    began = time.time()
    late = job.world_size - 1
    calls = [
        job.start(rank, diagnosis_programs.all_reduce, timeout=8.0)
        for rank in range(job.world_size)
        if rank != late
    ]
    slow = job.start(late, diagnosis_programs.load_batch, seconds=12.0)
    incident = await_incident(services, job, "late_rank", began)
    assert incident["culprit"] == rank_culprit(job, late)
    assert (incident["effect"], incident["communication"]) == ("hang", False)
    process = "its process is in load_batch (diagnosis_programs.py:"
    assert f"waits for rank {late} on node {job.nodes[late]}: {process}" in incident["sentence"]

    for node in job.node_names:
        says_so = partial(_is_said, services, node, incident["sentence"])
        wait_until(says_so, f"{node} says so", KNOWN_SECONDS)
    log = (services.folder / f"{job.nodes[late]}.log").read_text()
    assert incident["sentence"] in log
    for failure in failures(calls):
        assert f"has not called it (its last op was {incident['seq'] - 1}): {process}" in str(
            failure.error
        )
    slow.failure()
    await_end(services, job, incident)


def _is_said(services: Services, node: str, sentence: str) -> bool:
    return sentence in [each["sentence"] for each in services.status(node)["incidents"]]


def test_a_stopped_rank_is_named_and_nothing_is_left_when_it_goes_on(
    job: Job, services: Services
) -> None:
    began = time.time()
    calls = [job.start(rank, diagnosis_programs.all_reduce) for rank in range(1, job.world_size)]
    pid = job.ranks[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        incident = await_incident(services, job, "stopped_rank", began)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert incident["culprit"] == rank_culprit(job, 0)
    assert incident["sentence"].endswith("its process is stopped by a signal (SIGSTOP)")
    calls.append(job.start(0, diagnosis_programs.all_reduce))
    assert results(calls) == [[job.world_size] * 4] * job.world_size
    await_end(services, job, incident)


def test_a_stopped_rank_that_owes_a_message_is_named_and_the_error_says_why(
    job: Job, services: Services
) -> None:
    began = time.time()
    pid = job.ranks[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        call = job.start(1, diagnosis_programs.receive, source=0, timeout=4.0)
        incident = await_incident(services, job, "stopped_rank", began)
        (failure,) = failures([call])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert incident["culprit"] == rank_culprit(job, 0)
    assert incident["seq"] is None
    assert incident["sentence"].startswith(
        f"recv(float32[4], from rank 0, tag 0) of rank 1 in group '{job.name}' waits for rank 0 on "
    )
    reason = "its process is stopped by a signal (SIGSTOP)"
    assert incident["sentence"].endswith(reason)
    assert f"rank 0 has not sent it; {reason}" in failure.error.message
    await_end(services, job, incident)


@pytest.mark.long
def test_a_rank_that_is_slower_than_the_others_is_named_with_both_times(
    job: Job, services: Services
) -> None:
    began = time.time()
    calls = [
        job.start(rank, diagnosis_programs.train, seconds=6.0, compute_seconds=slow)
        for rank, slow in enumerate([0.1, *[0.005] * (job.world_size - 1)])
    ]
    incident = await_incident(services, job, "slow_rank", began)
    assert incident["culprit"] == rank_culprit(job, 0)
    assert incident["effect"] == "slow"
    assert incident["evidence"]["own"] > 3 * incident["evidence"]["others"]
    results(calls)
    await_end(services, job, incident)


def test_ranks_that_compute_alike_are_no_incident(job: Job, services: Services) -> None:
    before = len(incidents(services, job))
    results(job.start_all(diagnosis_programs.train, seconds=3.0, compute_seconds=0.01))
    assert len(incidents(services, job)) == before


def test_a_wrong_call_is_an_incident_of_the_rank_that_made_it(job: Job, services: Services) -> None:
    began = time.time()
    calls = [
        job.start(rank, programs.call, shape=(5 if rank == 1 else 4,))
        for rank in range(job.world_size)
    ]
    failed = failures(calls)
    incident = await_incident(services, job, "wrong_call", began)
    assert incident["culprit"] == rank_culprit(job, 1)
    assert incident["sentence"] in str(failed[0].error)


def test_a_wrong_call_is_an_incident_also_where_all_ranks_end_with_its_error(
    pool: RankPool, services: Services
) -> None:
    began = time.time()
    with pool.unregistered(SHAPES["2x2"]) as job:
        job.enter(services, timeout=OP_SECONDS)
        wrong = (4, 5, 4, 4)
        start = partial(job.start, program=diagnosis_programs.call_and_leave)
        failures([start(rank, numel=numel) for rank, numel in enumerate(wrong)])
        incident = await_incident(services, job, "wrong_call", began)
        assert incident["culprit"] == rank_culprit(job, 1)
        assert len(incidents(services, job)) == 1


def test_a_stopped_rank_keeps_its_number_when_the_others_have_given_up(
    pool: RankPool, services: Services
) -> None:
    began = time.time()
    with pool.unregistered(SHAPES["3x1"]) as job:
        job.enter(services, timeout=OP_SECONDS)
        job.run(diagnosis_programs.all_reduce)
        os.kill(job.ranks[1].pid, signal.SIGSTOP)
        try:
            start = partial(job.start, program=diagnosis_programs.call_and_leave)
            failures([start(rank, timeout=3.0) for rank in (0, 2)])
            await_end(services, job, await_incident(services, job, "stopped_rank", began))
        finally:
            os.kill(job.ranks[1].pid, signal.SIGCONT)
        (incident,) = incidents(services, job)
        assert incident["culprit"] == rank_culprit(job, 1)


def test_a_killed_rank_is_an_incident_and_the_losses_that_follow_are_none(
    pool: RankPool, services: Services
) -> None:
    began = time.time()
    with pool.unregistered(SHAPES["2x2"]) as job:
        job.enter(services, timeout=OP_SECONDS)
        job.run(diagnosis_programs.all_reduce)
        job.ranks[3].kill()
        incident = await_incident(services, job, "exited_rank", began)
        assert incident["culprit"] == rank_culprit(job, 3)
        assert "ended without leaving the group" in incident["sentence"]
        failures([job.start(rank, diagnosis_programs.all_reduce) for rank in range(3)])
        assert len(incidents(services, job)) == 1


@pytest.mark.parametrize("order", [[(0, 2, 3)], [(2, 3), (0,)]], ids=["together", "after others"])
def test_a_rank_that_leaves_while_others_count_on_it_is_named(
    pool: RankPool, services: Services, order: list[tuple[int, ...]]
) -> None:
    """The node that reports it may hear of the failure before a rank of its own has called."""
    began = time.time()
    with pool.unregistered(SHAPES["2x2"]) as job:
        job.enter(services, timeout=OP_SECONDS)
        job.run(diagnosis_programs.all_reduce)
        job.ranks[1].start(rank_worker.close_group, name=job.name).result()
        for ranks in order:
            failures([job.start(rank, diagnosis_programs.all_reduce) for rank in ranks])
        incident = await_incident(services, job, "exited_rank", began)
        assert incident["culprit"] == rank_culprit(job, 1)
        assert "which left the group" in incident["sentence"]
        assert len(incidents(services, job)) == 1


@pytest.mark.long
def test_a_killed_agent_is_named_by_those_that_are_left(pool: RankPool, services: Services) -> None:
    began = time.time()
    with pool.unregistered(SHAPES["3x1"]) as job:
        job.enter(services, timeout=OP_SECONDS)
        job.run(diagnosis_programs.all_reduce)
        services.kill_agent("node0")  # the leader of the group
        incident = await_incident(services, job, "lost_node", began)
        assert incident["culprit"] == {"kind": "node", "node": "node0", "rank": None, "to": ""}
        assert incident["communication"]


def test_the_history_has_a_sample_per_second_with_what_each_rank_needs(
    job: Job, services: Services
) -> None:
    results(job.start_all(diagnosis_programs.train, seconds=3.0, compute_seconds=0.02))
    node = job.nodes[0]
    url = f"{services.agents[node].control_url}/v1/history"

    def samples() -> list[Json]:
        groups = services.get(url)["groups"]
        return [s for each in groups if each["name"] == job.name for s in each["samples"]]

    wait_until(lambda: any(each["latency"] for each in samples()), "there are figures", 5.0)
    sample = max(samples(), key=lambda each: each["ops"])
    assert sample["ops"] > 5
    assert sample["bytes"] > 0
    assert 0.5 < sample["seconds"] < 10
    local = {str(rank) for rank, name in enumerate(job.nodes) if name == node}
    assert sample["ranks"].keys() == local
    assert all(0.01 < each["own"] < 1.0 for each in sample["ranks"].values())
    newest = samples()[-1]["at"]
    assert not services.get(f"{url}?since={newest + 60}")["groups"][0]["samples"]
