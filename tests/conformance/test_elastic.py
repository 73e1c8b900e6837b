"""Ranks and nodes join and leave groups that run, and every op has one outcome on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allfold_core.errors import (
    BelowMinWorld,
    GroupFull,
    RegisterParamsMismatch,
    WorldChanged,
)
from tests.conformance import elastic_programs as programs
from tests.support.processes.ranks import Call, Job, RankPool, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

SHRINK = {"on_loss": "shrink", "timeout": 30.0}
BOUNDARIES = pytest.mark.parametrize("boundaries", [False, True], ids=["any", "commit"])


def options_of(boundaries: bool, **others: Any) -> dict[str, Any]:
    return {**SHRINK, "joins": "commit" if boundaries else "any", **others}


def join(job: Job, services: Services, rank: int, **options: Any) -> Call:
    return job.ranks[rank].start(
        programs.join, name=job.name, agent=services.socket_of(job.nodes[rank]), **options
    )


def open_with(job: Job, services: Services, ranks: Sequence[int], **options: Any) -> None:
    """Open the group with some ranks, which have no numbers of their own."""
    calls = [join(job, services, rank, world_size=len(ranks), **options) for rank in ranks]
    told = sorted(results(calls))
    assert told == [[number, len(ranks), 0] for number in range(len(ranks))]


def begin(job: Job, rank: int, folder: Path, *, boundaries: bool) -> Call:
    return job.start(rank, programs.train, folder=str(folder), me=rank, boundaries=boundaries)


def open_and_begin(
    job: Job, services: Services, folder: Path, ranks: Sequence[int], *, boundaries: bool
) -> dict[int, Call]:
    """Open the group with some ranks, which train until they are stopped."""
    open_with(job, services, ranks, **options_of(boundaries))
    return {rank: begin(job, rank, folder, boundaries=boundaries) for rank in ranks}


def replace_the_lost_one(
    job: Job, services: Services, folder: Path, calls: dict[int, Call], *, boundaries: bool
) -> None:
    """Rank 3 joins those that are left of three, and all train until they are stopped."""
    assert join(job, services, 3, **options_of(boundaries)).result()[:2] == [2, 3]
    calls[3] = begin(job, 3, folder, boundaries=boundaries)
    await_size(folder, 3, 3)
    (folder / "stop").touch()


def await_size(folder: Path, rank: int, size: int) -> None:
    wait_until(
        lambda: any(each.name.startswith(f"{rank}.{size}.") for each in folder.iterdir()),
        f"rank {rank} is in a group of {size}",
        30.0,
    )


def check(told: Sequence[dict[str, Any]]) -> None:
    """Check that ranks that did the same op had the same outcome of it."""
    outcomes: dict[int, tuple[int, int]] = {}
    for each in told:
        seqs = [seq for seq, *_ in each["outcomes"]]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs))), "each op once"
        for seq, value, participants in each["outcomes"]:
            assert outcomes.setdefault(seq, (value, participants)) == (value, participants)


def has_called(services: Services, job: Job, node: str) -> bool:
    """Tell if the one rank of a node, whatever its number, has called an op."""
    (last,) = services.group_status(node, job.name)["last_seq"].values()
    return int(last) >= 0


@BOUNDARIES
def test_ranks_join_on_nodes_that_are_in_the_group_and_on_others(
    pool: RankPool, services: Services, tmp_path: Path, boundaries: bool
) -> None:
    with pool.unregistered((0, 1, 0, 2)) as job:
        open_with(job, services, (0, 1), **options_of(boundaries))
        calls = [begin(job, rank, tmp_path, boundaries=boundaries) for rank in (0, 1)]
        for each in (0, 1):  # else others may join before the first op
            await_size(tmp_path, each, 2)
        for newcomer, size in ((2, 3), (3, 4)):
            rank, world_size, _ = join(job, services, newcomer, **options_of(boundaries)).result()
            assert (rank, world_size) == (size - 1, size)
            calls.append(begin(job, newcomer, tmp_path, boundaries=boundaries))
            for each in range(size):
                await_size(tmp_path, each, size)
        (tmp_path / "stop").touch()
        told = results(calls)
        check(told)
        assert [size for size, _ in told[0]["sizes"]] == [2, 3, 4]
        assert told[2]["outcomes"][0][0] > 0, "it has begun with a later op"


@BOUNDARIES
def test_a_rank_that_was_killed_comes_back(
    pool: RankPool, services: Services, tmp_path: Path, boundaries: bool
) -> None:
    with pool.unregistered((0, 1, 2, 1)) as job:
        calls = open_and_begin(job, services, tmp_path, (0, 1, 2), boundaries=boundaries)
        await_size(tmp_path, 0, 3)
        job.ranks[1].kill()
        await_size(tmp_path, 0, 2)
        replace_the_lost_one(job, services, tmp_path, calls, boundaries=boundaries)
        told = results([calls[rank] for rank in (0, 2, 3)])
        check(told)
        assert [size for size, _ in told[0]["sizes"]] == [3, 2, 3]


@BOUNDARIES
def test_a_node_that_was_killed_comes_back_under_its_name(
    pool: RankPool, services: Services, tmp_path: Path, boundaries: bool
) -> None:
    with pool.unregistered((0, 1, 2, 1)) as job:
        calls = open_and_begin(job, services, tmp_path, (0, 1, 2), boundaries=boundaries)
        await_size(tmp_path, 0, 3)
        services.kill_agent("node1")
        await_size(tmp_path, 0, 2)
        services.restart_dead_agents()
        replace_the_lost_one(job, services, tmp_path, calls, boundaries=boundaries)
        check(results([calls[rank] for rank in (0, 2, 3)]))
        job.ranks[1].kill()


def test_a_rank_leaves_at_a_boundary_and_nothing_is_redone(
    pool: RankPool, services: Services, tmp_path: Path
) -> None:
    with pool.unregistered((0, 1, 2)) as job:
        open_with(job, services, (0, 1, 2), **options_of(True))
        calls = [begin(job, rank, tmp_path, boundaries=True) for rank in (0, 1)]
        leaving = job.start(2, programs.leave_at_a_boundary, folder=str(tmp_path), me=2)
        done = leaving.result()["done"]
        await_size(tmp_path, 0, 2)
        (tmp_path / "stop").touch()
        told = results(calls)
        check(told)
        assert told[0]["sizes"] == [[3, 0], [2, done]], "all its ops have it among the participants"


def test_messages_reach_newcomers(pool: RankPool, services: Services) -> None:
    with pool.unregistered((0, 1, 1, 2)) as job:
        open_with(job, services, (0, 1), **SHRINK)
        for newcomer in (2, 3):
            call = join(job, services, newcomer, **SHRINK)
            present = list(range(newcomer))
            assert call.result()[1] == newcomer + 1
            ranks = [*present, newcomer]
            results([job.start(rank, programs.reduce_once) for rank in ranks])
            told = results([job.start(rank, programs.exchange_in_a_circle) for rank in ranks])
            size = len(ranks)
            assert sorted(each[0] for each in told) == [float(rank) for rank in range(size)]
            assert all(each[0] == each[1] for each in told)


def test_tensors_shaped_by_the_world_size_are_made_anew_when_somebody_joins(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered((0, 1, 2)) as job:
        open_with(job, services, (0, 1), **SHRINK)
        assert join(job, services, 2, **SHRINK).result()[1] == 3
        told = results([job.start(rank, programs.gather) for rank in range(3)])
        assert told == [[0.0, 1.0, 2.0]] * 3


def test_with_raise_all_ranks_hear_that_somebody_has_joined_and_the_next_op_works(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered((0, 1)) as job:
        open_with(job, services, (0,))
        assert join(job, services, 1).result() == [1, 2, 1]
        calls = [job.start(rank, programs.reduce_once) for rank in (0, 1)]
        errors = [call.failure().error for call in calls]
        assert all(type(error) is WorldChanged for error in errors)
        assert len({error.message for error in errors}) == 1
        assert "has taken in rank 1 on node node1; it has 2 ranks" in errors[0].message
        calls = [job.start(rank, programs.reduce_once) for rank in (0, 1)]
        assert results(calls) == [[2.0, 2]] * 2


def test_one_rank_too_many_gets_in_when_another_has_left(
    pool: RankPool, services: Services
) -> None:
    options = {**SHRINK, "max_world": 2}
    with pool.unregistered((0, 1, 2)) as job:
        open_with(job, services, (0, 1), **options)
        refused = join(job, services, 2, **options, init_timeout=0.5).failure().error
        assert type(refused) is GroupFull
        assert refused.message == (
            f"group {job.name} has 2 ranks, and max_world is 2: one more, on node node2, can join "
            "when one of them has left; this rank has waited 0.5 s for that"
        )
        waiting = join(job, services, 2, **options)
        job.start(1, programs.leave).result()
        assert waiting.result()[1] == 2


def test_a_running_group_takes_in_nobody_without_its_key(
    pool: RankPool, services: Services
) -> None:
    options = {**SHRINK, "group_key": "sesame"}
    with pool.unregistered((0, 1)) as job:
        open_with(job, services, (0,), **options)
        for wrong in ("", "guess"):
            refused = join(job, services, 1, **{**options, "group_key": wrong}).failure().error
            assert type(refused) is RegisterParamsMismatch
            assert "ALLFOLD_GROUP_KEY" in refused.message
        assert join(job, services, 1, **options).result()[1] == 2


def test_other_parameters_than_those_of_the_group_are_refused(
    pool: RankPool, services: Services
) -> None:
    with pool.unregistered((0, 1)) as job:
        open_with(job, services, (0,), **SHRINK)
        refused = join(job, services, 1, **SHRINK, min_world=2, world_size=2).failure().error
        assert type(refused) is RegisterParamsMismatch
        assert "min_world: the group has 1, " in refused.message


def test_below_min_world_ops_wait_for_others_to_join(pool: RankPool, services: Services) -> None:
    options = {**SHRINK, "min_world": 2}
    with pool.unregistered((0, 1, 2)) as job:
        open_with(job, services, (0, 1), **options)
        in_flight = job.start(0, programs.reduce_once)
        wait_until(lambda: has_called(services, job, "node0"), "the op is called")
        job.ranks[1].kill()
        assert type(in_flight.failure().error) is BelowMinWorld
        waiting = job.start(0, programs.reduce_once)
        assert join(job, services, 2, **options).result() == [1, 2, 2]
        assert results([waiting, job.start(2, programs.reduce_once)]) == [[2.0, 2]] * 2


def test_below_min_world_ops_fail_where_nobody_joins_in_time(
    pool: RankPool, services: Services
) -> None:
    options = {**SHRINK, "min_world": 2, "init_timeout": 1.0}
    with pool.unregistered((0, 1)) as job:
        open_with(job, services, (0, 1), **options)
        job.ranks[1].kill()
        wait_until(
            lambda: services.group_status("node0", job.name)["world_size"] == 1, "it is noticed"
        )
        error = job.start(0, programs.reduce_once).failure().error
        assert type(error) is BelowMinWorld
        assert "1 rank is left and min_world is 2" in error.message


def test_a_rank_that_dies_before_it_is_let_in_holds_nobody_up(
    pool: RankPool, services: Services, tmp_path: Path
) -> None:
    with pool.unregistered((0, 1, 2)) as job:
        open_with(job, services, (0, 1), **options_of(True))
        waiting = join(job, services, 2, **options_of(True))
        results([job.start(rank, programs.reduce_once) for rank in (0, 1)])
        wait_until(lambda: services.seated(job.name) == 3, "the third rank waits")
        job.ranks[2].kill()
        calls = [begin(job, rank, tmp_path, boundaries=True) for rank in (0, 1)]
        await_size(tmp_path, 0, 2)
        (tmp_path / "stop").touch()
        check(results(calls))
        del waiting


def enter_with_state(
    job: Job, services: Services, rank: int, *, numel: int = 1000, **options: Any
) -> Call:
    return job.ranks[rank].start(
        programs.join_with_state,
        name=job.name,
        agent=services.socket_of(job.nodes[rank]),
        numel=numel,
        **{**SHRINK, "world_size": 2, **options},
    )


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
@pytest.mark.parametrize("least", [2, 3])
def test_whoever_joins_too_few_gets_their_state(
    pool: RankPool, services: Services, tmp_path: Path, least: int, on_loss: str
) -> None:
    options: dict[str, Any] = {"on_loss": on_loss, "min_world": least, "world_size": least}
    train: dict[str, Any] = {"folder": str(tmp_path), "steps": 30}
    first, lost, newcomers = [0], [*range(1, least)], [*range(least, 2 * least - 1)]
    with pool.unregistered((0, *([1] * (least - 1)), *newcomers)) as job:
        results([enter_with_state(job, services, rank, **options) for rank in (*first, *lost)])
        calls = {
            rank: job.start(rank, programs.train_with_state, me=rank, **train)
            for rank in (*first, *lost)
        }
        await_size(tmp_path, 0, least)
        for rank in lost:
            job.ranks[rank].kill()
        for rank in newcomers:
            _, world_size, step = enter_with_state(job, services, rank, **options).result()
            assert world_size <= least
            assert step > 0, "it has the state of those who wait"
            calls[rank] = job.start(rank, programs.train_with_state, me=rank, **train)
        await_size(tmp_path, newcomers[-1], least)
        (tmp_path / "stop").touch()
        told = results([calls[rank] for rank in (*first, *newcomers)])
        assert told == [[30, 30.0, 30.0]] * least


def test_a_rank_that_waits_for_others_can_be_told_to_leave(
    pool: RankPool, services: Services, tmp_path: Path
) -> None:
    with pool.unregistered((0, 1)) as job:
        results([enter_with_state(job, services, rank, min_world=2) for rank in (0, 1)])
        job.ranks[1].kill()
        waiting = job.start(0, programs.wait_until_drained)
        wait_until(
            lambda: services.group_status("node0", job.name)["world_size"] == 1, "it is lost"
        )
        assert waiting.result() == "the program asked for it"


def test_too_few_ranks_that_commit_wait_for_others_for_as_long_as_for_an_opening(
    pool: RankPool, services: Services, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"min_world": 2, "init_timeout": 1.0}
    with pool.unregistered((0, 1)) as job:
        results([enter_with_state(job, services, rank, **options) for rank in (0, 1)])
        job.ranks[1].kill()
        for said in ("1 rank is left and min_world is 2", "no others have joined within 1 s"):
            error = job.start(0, programs.reduce_once).failure().error
            assert type(error) is BelowMinWorld
            assert said in error.message


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
def test_a_rank_that_replaces_one_which_died_as_the_state_was_shared_gets_it_too(
    pool: RankPool, services: Services, on_loss: str
) -> None:
    """With fewer than ``min_world`` ranks nothing is shared until others have come."""
    options: dict[str, Any] = {"min_world": 3, "world_size": 3, "on_loss": on_loss}

    def enter(job: Job, rank: int, number: int | None) -> Call:
        return job.ranks[rank].start(
            programs.open_with_state,
            name=job.name,
            agent=services.socket_of(job.nodes[rank]),
            number=number,
            dies=number == 2,
            **options,
        )

    with pool.unregistered((0, 1, 0, 1)) as job:
        calls = [enter(job, rank, rank) for rank in range(3)]

        def sizes() -> list[int]:
            groups = services.status("node1")["groups"]
            return [each["world_size"] for each in groups if each["name"] == job.name]

        wait_until(lambda: sizes() == [2], "one has died")
        calls[2] = enter(job, 3, None)
        assert results(calls) == [[3, 0.0, 0.0]] * 3, "all have that of rank 0"


@pytest.mark.long
@pytest.mark.parametrize("numel", [1000, 3_000_000], ids=["short", "long"])
def test_a_rank_that_joins_goes_on_from_the_state_of_the_others(
    pool: RankPool, services: Services, tmp_path: Path, numel: int
) -> None:
    def enter(job: Job, rank: int) -> Call:
        return enter_with_state(job, services, rank, numel=numel)

    with pool.unregistered((0, 1, 2, 1)) as job:
        assert sorted(results([enter(job, 0), enter(job, 1)])) == [[0, 2, 0], [1, 2, 0]]
        train: dict[str, Any] = {"folder": str(tmp_path), "steps": 30}
        calls = {
            rank: job.start(rank, programs.train_with_state, me=rank, **train) for rank in (0, 1)
        }
        for newcomer, victim in ((2, 1), (3, None)):
            rank, world_size, step = enter(job, newcomer).result()
            assert (rank, world_size) == (2, 3)
            assert step > 0, "it has the state of those who run"
            calls[newcomer] = job.start(newcomer, programs.train_with_state, me=newcomer, **train)
            await_size(tmp_path, newcomer, 3)
            if victim is not None:
                job.ranks[victim].kill()
                await_size(tmp_path, newcomer, 2)
        (tmp_path / "stop").touch()
        assert results([calls[rank] for rank in (0, 2, 3)]) == [[30, 30.0, 30.0]] * 3
