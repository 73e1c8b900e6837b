"""A group outlives its ranks: those who are left go on, with one outcome for each op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allfold_core.errors import BelowMinWorld, PeerLost, RootLost, WorldChanged
from tests.conformance import programs, survival_programs
from tests.conformance.conftest import OP_SECONDS, SHAPES
from tests.support.processes import rank_worker
from tests.support.processes.ranks import Call, Job, RankPool, await_called, failures, results
from tests.support.processes.services import Services
from tests.support.waiting import wait_until

SIZES = pytest.mark.parametrize("numel", [10, 500_000], ids=["short", "long"])


def under_way(folder: Path, ranks: int) -> None:
    """Return once so many ranks have done some ops."""
    wait_until(lambda: len(list(folder.iterdir())) >= ranks, "ops are done", 30.0)


def await_epoch(job: Job, services: Services, ordinal: int, nodes: Sequence[str]) -> None:
    """Wait until nodes have agreed so often on fewer ranks."""
    wait_until(
        lambda: all(services.group_status(node, job.name)["epoch"] >= ordinal for node in nodes),
        f"epoch {ordinal}",
    )


def go_on(job: Job, ranks: Sequence[int]) -> None:
    """Check that ranks do an op, each with the number that it has now."""
    total = sum(range(1, len(ranks) + 1))
    assert results([job.start(rank, programs.call) for rank in ranks]) == (
        [[total] * 4] * len(ranks)
    )


def call_all(job: Job, ranks: Sequence[int], services: Services, **options: Any) -> list[Call]:
    """Ranks call an op; returns when their agents have got the calls."""
    seq = job.start(ranks[0], programs.counted).result()
    calls = [job.start(rank, programs.call, **options) for rank in ranks]
    for rank in ranks:
        await_called(services, job, seq, rank)
    return calls


@SIZES
@pytest.mark.parametrize("shape", ["1x3", "2x2", "5x1", "1+2+3"])
def test_ranks_go_on_after_each_of_several_losses_with_the_same_numbers_of_their_own(
    pool: RankPool, services: Services, tmp_path: Path, shape: str, numel: int
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS) as job:
        calls = job.start_all(survival_programs.train, numel=numel, folder=str(tmp_path))
        under_way(tmp_path, job.world_size)
        left = list(range(job.world_size))
        for ordinal, victim in enumerate((job.world_size - 1, 0), start=1):
            left.remove(victim)
            job.ranks[victim].kill()
            await_epoch(job, services, ordinal, sorted({job.nodes[rank] for rank in left}))
        (tmp_path / "stop").touch()
        told = results([calls[rank] for rank in left])
        assert len({str((each["done"], each["losses"])) for each in told}) == 1, told
        assert told[0]["losses"], "a loss is told"
        assert told[0]["losses"][-1][2] == len(left)
        nodes = len({job.nodes[rank] for rank in left})
        assert [each["numbers"] for each in told] == [
            [number, len(left), 2, nodes] for number in range(len(left))
        ]
        go_on(job, left)


@SIZES
@pytest.mark.parametrize("shape", ["1x3", "2x2", "5x1"])
def test_with_shrink_no_rank_hears_of_a_loss_and_all_results_have_the_same_participants(
    pool: RankPool, services: Services, tmp_path: Path, shape: str, numel: int
) -> None:
    with pool.job(SHAPES[shape], timeout=OP_SECONDS, on_loss="shrink") as job:
        calls = job.start_all(survival_programs.shrink, numel=numel, folder=str(tmp_path))
        under_way(tmp_path, job.world_size)
        job.ranks[1].kill()
        left = [rank for rank in range(job.world_size) if rank != 1]
        await_epoch(job, services, 1, sorted({job.nodes[rank] for rank in left}))
        (tmp_path / "stop").touch()
        told = results([calls[rank] for rank in left])
        assert len({str(each["counts"]) for each in told}) == 1, told
        assert [count[0] for count in told[0]["counts"]][:1] == [job.world_size]
        assert [each["numbers"][:3] for each in told] == [
            [number, len(left), 1] for number in range(len(left))
        ]


def test_the_ranks_that_are_left_outlive_all_those_of_another_node(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        go_on(job, range(4))
        for rank in (2, 3):
            job.ranks[rank].kill()
        await_epoch(job, services, 1, ["node0"])
        wait_until(
            lambda: services.group_status("node0", job.name)["nodes"] == ["node0"],
            "node1 has no rank in it any more",
        )
        for failure in failures([job.start(rank, programs.call) for rank in (0, 1)]):
            assert isinstance(failure.error, PeerLost)
        go_on(job, [0, 1])
        assert job.start(0, survival_programs.described).result()[1::2] == [2, 1]


def test_a_rank_that_leaves_takes_nothing_from_ops_that_shrink(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, on_loss="shrink") as job:
        go_on(job, range(4))
        calls = call_all(job, [0, 1, 3], services)
        job.ranks[2].run(rank_worker.close_group, name=job.name)
        # Their inputs are those that they gave when they were ranks 0, 1 and 3.
        assert results(calls) == [[1 + 2 + 4] * 4] * 3
        go_on(job, [0, 1, 3])


def test_an_op_without_its_root_fails_and_the_next_one_works(
    pool: RankPool, services: Services
) -> None:
    for on_loss in ("raise", "shrink"):
        with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, on_loss=on_loss) as job:
            go_on(job, range(4))
            calls = call_all(job, [0, 2, 3], services, kind="broadcast", root=1)
            job.ranks[1].kill()
            found = [failure.error for failure in failures(calls)]
            assert {type(error) for error in found} == {RootLost}, found
            assert len({str(error) for error in found}) == 1
            go_on(job, [0, 2, 3])


def test_an_op_whose_tensors_are_made_for_more_ranks_fails_and_the_next_one_works(
    pool: RankPool, services: Services
) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS, on_loss="shrink") as job:
        go_on(job, range(4))
        seq = job.start(0, programs.counted).result()
        left = [0, 1, 2]
        calls = [job.start(rank, survival_programs.gather) for rank in left]
        for rank in left:
            await_called(services, job, seq, rank)
        job.ranks[3].kill()
        found = [failure.error for failure in failures(calls)]
        assert {type(error) for error in found} == {WorldChanged}, found
        again = [job.start(rank, survival_programs.gather) for rank in left]
        assert results(again) == [[0, 1, 2]] * 3


def test_below_the_least_world_size_every_op_fails_at_once(
    pool: RankPool, services: Services
) -> None:
    options: dict[str, Any] = {"timeout": OP_SECONDS, "on_loss": "shrink", "min_world": 3}
    with pool.job(SHAPES["2x2"], **options) as job:
        go_on(job, range(4))
        job.ranks[3].kill()
        await_epoch(job, services, 1, ["node0", "node1"])
        go_on(job, [0, 1, 2])
        calls = call_all(job, [0, 1], services)
        job.ranks[2].kill()
        for failure in failures(calls):
            assert isinstance(failure.error, BelowMinWorld)
        for failure in failures([job.start(rank, programs.call) for rank in (0, 1)]):
            assert isinstance(failure.error, BelowMinWorld), str(failure)
            assert failure.seconds < OP_SECONDS / 2


def test_the_status_of_an_agent_says_who_was_lost(pool: RankPool, services: Services) -> None:
    with pool.job(SHAPES["2x2"], timeout=OP_SECONDS) as job:
        go_on(job, range(4))
        job.ranks[3].kill()
        await_epoch(job, services, 1, ["node0", "node1"])
        for node, ranks in (("node0", [0, 1]), ("node1", [2])):
            status = services.group_status(node, job.name)
            assert (status["world_size"], status["ranks"], status["evicted"]) == (3, ranks, "")
            assert status["losses"] == [
                f"group '{job.name}' has lost rank 3 on node node1, which ended without leaving "
                "the group; 3 of 4 ranks are left"
            ]
