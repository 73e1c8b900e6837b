"""Getting into a group and out of it: the order of calls, who fits, who is missing, once more."""

from __future__ import annotations

import time
from typing import Any

import pytest

from allfold_core.errors import (
    AgentLost,
    AgentUnreachable,
    InvalidArgument,
    MultipleRegister,
    MultipleUnregister,
    PeerMissing,
    RegisterNotFirstOperation,
    RegisterParamsMismatch,
)
from tests.conformance import programs
from tests.conformance.conftest import OP_SECONDS
from tests.support.processes import rank_worker
from tests.support.processes.ranks import Call, Job, Rank, RankPool, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

FUNCTIONS = ["all_reduce", "reduce", "broadcast", "barrier", "empty", "rank", "world_size"]


def works(job: Job) -> None:
    total = sum(range(1, job.world_size + 1))
    assert job.run(programs.call) == [[total] * 4] * job.world_size


def join(
    services: Services, rank: Rank, name: str, number: int, world_size: int, **options: Any
) -> Call:
    """Let a worker register as a rank, on node0 where nothing else is said."""
    node = options.pop("node", "node0")
    return rank.start(
        rank_worker.open_group,
        name=name,
        rank=number,
        world_size=world_size,
        agent=services.agents[node].socket,
        **options,
    )


def await_seats(services: Services, name: str, count: int) -> None:
    wait_until(lambda: services.seated(name) == count, f"{count} seats are taken in {name}")


# The key of a group


@pytest.mark.parametrize("wrong", ["", "guess"], ids=["none", "another one"])
def test_a_rank_without_the_key_of_a_group_is_refused_and_the_group_does_not_notice(
    pool: RankPool, services: Services, wrong: str
) -> None:
    with pool.unregistered([0, 0, 1]) as job:
        first = join(services, job.ranks[0], job.name, 0, 2, group_key="sesame")
        await_seats(services, job.name, 1)
        stranger = join(services, job.ranks[1], job.name, 1, 2, group_key=wrong)
        error = stranger.failure().error
        assert type(error) is RegisterParamsMismatch
        assert "ALLFOLD_GROUP_KEY" in error.message
        assert "sesame" not in str(error.to_dict())
        second = join(services, job.ranks[2], job.name, 1, 2, group_key="sesame", node="node1")
        results([first, second])
        assert "sesame" not in services.log_tails()


def test_a_rank_with_a_key_does_not_fit_a_group_without_one(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([0, 0]) as job:
        first = join(services, job.ranks[0], job.name, 0, 2, init_timeout=5)
        await_seats(services, job.name, 1)
        error = join(services, job.ranks[1], job.name, 1, 2, group_key="sesame").failure().error
        assert type(error) is RegisterParamsMismatch
        assert type(first.failure().error) is PeerMissing


# The order of calls


def test_nothing_works_before_init_and_the_error_says_so(pool: RankPool) -> None:
    with pool.unregistered([0]) as job:
        for kind in FUNCTIONS:
            error = job.ranks[0].start(programs.call_default, kind=kind).failure().error
            assert type(error) is RegisterNotFirstOperation, kind
            assert "allfold.init" in error.message
        error = job.ranks[0].start(programs.call_default, kind="shutdown").failure().error
        assert type(error) is MultipleUnregister


def test_nothing_works_after_shutdown_and_a_second_one_is_refused(pool: RankPool) -> None:
    with pool.job([0, 1]) as job:
        works(job)
        codes = job.run(programs.use_after_shutdown)
        assert codes == [["AF103", "AF103", "AF103", "AF103", "AF103", "AF105", "AF105"]] * 2


def test_init_twice_is_refused_and_the_group_goes_on(pool: RankPool, services: Services) -> None:
    with pool.job([0, 1]) as job:
        again = join(services, job.ranks[0], job.name, 0, 2)
        error = again.failure().error
        assert type(error) is MultipleRegister
        assert f"rank 0 of group '{job.name}' already" in error.message
        works(job)


def test_a_process_uses_one_agent_at_a_time(pool: RankPool, services: Services) -> None:
    with pool.job([0]) as job:
        error = join(services, job.ranks[0], "elsewhere", 0, 1, node="node1").failure().error
        assert type(error) is InvalidArgument
        assert services.agents["node1"].socket in error.message
        works(job)


def test_a_forked_child_is_told_to_call_init_itself(pool: RankPool) -> None:
    with pool.job([0]) as job:
        assert "forked child" in job.run(programs.all_reduce_in_forked_child)[0]
        works(job)


def test_the_agent_itself_refuses_ops_of_a_group_that_a_process_is_not_in(
    pool: RankPool,
) -> None:
    """A process that is in no group, or in another one, does not count as a caller."""
    with pool.job([0, 0]) as first, pool.job([0]) as second:
        error = second.start(0, programs.speak_for_another_group).failure().error
        assert type(error) is RegisterNotFirstOperation
        works(first)
        works(second)


@pytest.mark.parametrize("name", ["a/b", "..", "with space", "ü", "x" * 129, "a?b#c"])
def test_a_name_that_cannot_be_part_of_an_address_is_refused_at_once(
    pool: RankPool, services: Services, name: str
) -> None:
    with pool.unregistered([0]) as job:
        failure = join(services, job.ranks[0], name, 0, 1, init_timeout=5).failure()
        assert type(failure.error) is InvalidArgument
        assert failure.seconds < 2.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"number": 0, "world_size": 0}, "world"),
        ({"number": -1, "world_size": 1}, "rank"),
        ({"timeout": 0}, "timeout"),
        ({"init_timeout": -1}, "init_timeout"),
        ({"strategies": "all_reduce=bus"}, "bus"),
        ({"strategies": "broadcast=ring"}, "ring cannot run broadcast"),
        ({"strategies": {"sum": "ring"}}, "sum"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_sent(
    pool: RankPool, services: Services, options: dict[str, Any], named: str
) -> None:
    with pool.unregistered([0]) as job:
        call = join(services, job.ranks[0], "x", **({"number": 0, "world_size": 1} | options))
        with pytest.raises(InvalidArgument, match=named):
            raise call.failure().error


# Who fits


def test_a_rank_beyond_the_world_is_refused_and_does_not_wait(
    pool: RankPool, services: Services
) -> None:
    with pool.job([0, 1]) as job, pool.unregistered([0]) as extra:
        error = join(services, extra.ranks[0], job.name, 2, 2).failure().error
        assert type(error) is InvalidArgument
        failure = join(services, extra.ranks[0], job.name, 2, 3).failure()
        assert type(failure.error) is RegisterParamsMismatch
        assert failure.seconds < 2.0
        works(job)


@pytest.mark.parametrize(
    ("usual", "other", "expected", "got"),
    [
        ({}, {"world_size": 4}, "3", "4"),
        ({"timeout": 10}, {"timeout": 20}, "10", "20"),
        ({"strategies": "all_reduce=ring"}, {"strategies": ""}, "ring", "{}"),
    ],
    ids=["world size", "timeout", "strategies"],
)
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_only_the_rank_that_does_not_fit_is_refused_with_both_values(
    pool: RankPool,
    services: Services,
    usual: dict[str, Any],
    other: dict[str, Any],
    expected: str,
    got: str,
    node: str,
) -> None:
    """While the group forms; the others wait on for one that fits."""
    with pool.unregistered([0, 0, 0]) as job:
        common: dict[str, Any] = {"world_size": 3, "timeout": OP_SECONDS} | usual
        early = [join(services, job.ranks[n], job.name, n, **common) for n in range(2)]
        await_seats(services, job.name, 2)
        odd = join(services, job.ranks[2], job.name, 2, node=node, **(common | other))
        error = odd.failure().error
        assert type(error) is RegisterParamsMismatch
        for shown in (expected, got, "rank 2", node):
            assert shown in error.message
        results([*early, join(services, job.ranks[2], job.name, 2, **common)])
        works(job)


@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_rank_that_is_taken_is_refused_and_the_holder_is_named(
    pool: RankPool, services: Services, node: str
) -> None:
    """On the same node or on another one, while the group forms and when it is complete."""
    with pool.unregistered([0, 0]) as job, pool.unregistered([0]) as extra:
        first = join(services, job.ranks[0], job.name, 0, 2)
        await_seats(services, job.name, 1)
        for complete in (False, True):
            if complete:
                results([first, join(services, job.ranks[1], job.name, 1, 2)])
            error = join(services, extra.ranks[0], job.name, 0, 2, node=node).failure().error
            assert type(error) is MultipleRegister
            assert "rank 0" in error.message
            assert "node node0" in error.message
        works(job)


# Who is missing


def test_a_group_that_does_not_complete_names_the_missing_ranks_and_a_retry_works(
    pool: RankPool, services: Services
) -> None:
    """The registrations are rolled back: the same ranks may come again, also in other numbers."""
    with pool.unregistered([0, 0, 0]) as job:
        present = [join(services, job.ranks[n], job.name, n, 4, init_timeout=2.0) for n in (0, 2)]
        await_seats(services, job.name, 2)
        found = failures(present)
        for failure in found:
            assert type(failure.error) is PeerMissing
            assert failure.error.details["missing_ranks"] == [1, 3]
            assert "ranks 1, 3 of 4 did not come" in failure.error.message
            assert "with ALLFOLD_INIT_TIMEOUT or init_timeout=." in failure.error.message
            assert failure.seconds < 2.0 + 4.0
        job.enter(services, timeout=OP_SECONDS)
        works(job)


def test_ranks_that_wait_in_vain_are_told_why_another_was_refused(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([0, 0]) as job:
        waiting = join(services, job.ranks[0], job.name, 0, 2, init_timeout=2.0)
        await_seats(services, job.name, 1)
        refused = join(services, job.ranks[1], job.name, 1, 3, node="node1").failure().error
        assert type(refused) is RegisterParamsMismatch
        error = waiting.failure().error
        assert type(error) is PeerMissing
        assert "rank 1 of 2 did not come. A rank was refused: rank 1 on node node1" in error.message
        assert "world_size: the group has 2, rank 1 came with 3" in error.message


def test_who_gives_up_last_does_not_miss_those_that_gave_up_before(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([0, 0, 1]) as job:
        first = join(services, job.ranks[0], job.name, 0, 4, init_timeout=1.0)
        last = join(services, job.ranks[2], job.name, 2, 4, node="node1", init_timeout=3.0)
        await_seats(services, job.name, 2)
        assert first.failure().error.details["gave_up_ranks"] == []
        error = last.failure().error
        assert error.details["missing_ranks"] == [1, 3]
        assert error.details["gave_up_ranks"] == [0]
        assert "ranks 1, 3 of 4 did not come; rank 0 came, and gave up before" in error.message


def test_a_rank_that_dies_while_it_registers_gives_its_seat_back(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered([0, 0, 0]) as job:
        early = [join(services, job.ranks[n], job.name, n, 3) for n in (0, 1)]
        await_seats(services, job.name, 2)
        job.ranks[1].kill()
        await_seats(services, job.name, 1)
        with pool.unregistered([0]) as spare:
            replacement = [
                join(services, spare.ranks[0], job.name, 1, 3),
                join(services, job.ranks[2], job.name, 2, 3),
            ]
            results([early[0], *replacement])
            whole = Job(job.name, [job.ranks[0], spare.ranks[0], job.ranks[2]], job.nodes)
            works(whole)
            whole.leave()


def test_an_agent_that_is_restarted_while_a_group_forms_costs_its_rank_a_retry(
    pool: RankPool, services: Services
) -> None:
    """The ranks on other nodes wait on."""
    with pool.unregistered([0, 2, 2]) as job:
        early = job.start_entering(services, [0, 1], timeout=OP_SECONDS)
        await_seats(services, job.name, 2)
        services.kill_agent("node2")
        assert type(early[1].failure().error) is AgentLost
        services.restart_dead_agents()
        again = job.start_entering(services, [1, 2], timeout=OP_SECONDS)
        job.entered([early[0], *again])
        works(job)


def test_an_agent_that_does_not_listen_is_named_in_time(pool: RankPool, services: Services) -> None:
    with pool.unregistered([0]) as job:
        nowhere = str(services.folder / "nobody.sock")
        call = job.ranks[0].start(
            rank_worker.open_group,
            name="x",
            rank=0,
            world_size=1,
            agent=nowhere,
            init_timeout=0.5,
        )
        failure = call.failure()
        assert type(failure.error) is AgentUnreachable
        assert nowhere in failure.error.message
        assert 0.4 < failure.seconds < 4.0


# Once more


def test_a_name_is_used_again_at_once_with_other_counts_and_other_nodes(
    pool: RankPool,
) -> None:
    """Each time the mean divides by the ranks of that registration."""
    for nodes in ([0, 0, 1], [1, 0], [2, 1, 0, 0], [0], [0, 0, 1]):
        with pool.job(nodes, "again", timeout=OP_SECONDS) as job:
            works(job)
            mean = (job.world_size + 1) / 2
            assert job.run(programs.call, op="mean") == [[mean] * 4] * job.world_size


def test_a_rank_that_comes_alone_hears_who_still_has_the_name_and_gets_it_once_they_left(
    pool: RankPool, services: Services
) -> None:
    with pool.job([0, 0, 1], timeout=OP_SECONDS) as job:
        first, *others = job.ranks
        first.run(rank_worker.close_group, name=job.name)
        error = join(services, first, job.name, 0, 2, init_timeout=1.0).failure().error
        assert type(error) is PeerMissing
        assert error.details["held_by"] == {"node0": [1], "node1": [2]}
        assert "that still has rank 1 on node node0; rank 2 on node node1. A group" in error.message
        waits = join(services, first, job.name, 0, 1)
        for rank in others:
            rank.run(rank_worker.close_group, name=job.name)
        assert waits.result()["opening"] > job.opening


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1, 1], [0, 1, 2]])
def test_ranks_may_leave_and_come_back_at_once(
    pool: RankPool, services: Services, nodes: list[int]
) -> None:
    """Whoever comes first must not find the seats of the others still taken."""
    with pool.job(nodes, timeout=OP_SECONDS) as job:
        calls = [
            rank.start(
                rank_worker.reopen_group,
                name=job.name,
                times=10,
                rank=number,
                world_size=job.world_size,
                agent=services.socket_of(job.nodes[number]),
                timeout=OP_SECONDS,
            )
            for number, rank in enumerate(job.ranks)
        ]
        openings = results(calls)
        assert all(each == openings[0] for each in openings)
        assert len(set(openings[0])) == 10
        works(job)


def test_two_jobs_of_other_names_do_not_disturb_each_other(pool: RankPool) -> None:
    with pool.job([0, 1, 2]) as first, pool.job([0, 0, 1, 2]) as second:
        streams = [
            *first.start_all(programs.stream, numel=10_000, seconds=0.5),
            *second.start_all(programs.stream, numel=10_000, seconds=0.5),
        ]
        assert min(results(streams)) > 0


def test_after_shutdown_the_agents_know_nothing_of_the_group(
    pool: RankPool, services: Services
) -> None:
    with pool.job([0, 0, 1]) as job:
        works(job)
        name = job.name
    started = time.monotonic()
    for node in ("node0", "node1"):

        def gone(node: str = node) -> bool:
            return name not in {group["name"] for group in services.status(node)["groups"]}

        wait_until(gone, f"{node} has closed the group")
    assert time.monotonic() - started < 4.0, "nothing was owed to anybody, so nothing to wait for"
