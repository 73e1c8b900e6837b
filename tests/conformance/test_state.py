"""States over real agents: ranks that come late get that of the others, whoever dies meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allfold_core.errors import InvalidArgument, PeerError, PeerLost
from tests.conformance import state_programs
from tests.support.processes.ranks import Call, Job, RankPool, failures, results
from tests.support.processes.services import Services

MIB = 1 << 20
SECONDS = 40.0


def begun(job: Job, nbytes: int) -> list[Any]:
    """Let all ranks begin with the state of rank 0."""
    contents = job.run(state_programs.begin, nbytes=nbytes)
    assert contents == [contents[0]] * job.world_size
    return list(contents[0])


@pytest.mark.parametrize("nbytes", [0, 1000, 30 * MIB])
@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 2), (0, 0, 1)], ids=str)
def test_late_ranks_get_the_state_of_the_others(
    pool: RankPool, nodes: tuple[int, ...], nbytes: int
) -> None:
    with pool.job(nodes, timeout=SECONDS) as job:
        content = begun(job, nbytes)
        for late in ([2], [0, 1], [0]):
            came = job.run(state_programs.come_late, late=late, nbytes=nbytes)
            assert [each["content"] for each in came] == [content] * len(nodes)


def test_nothing_is_pulled_where_all_have_the_same_state(pool: RankPool) -> None:
    with pool.job((0, 1), timeout=SECONDS) as job:
        content = begun(job, MIB)
        came = job.run(state_programs.come_late, late=[], nbytes=MIB)
        assert [each["content"] for each in came] == [content] * 2


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)], ids=str)
def test_a_newcomer_catches_up_while_the_others_go_on(
    pool: RankPool, nodes: tuple[int, ...]
) -> None:
    with pool.job(nodes, timeout=SECONDS) as job:
        content = begun(job, 20 * MIB)
        for _ in range(2):
            came = job.run(state_programs.join_while_others_go_on, nbytes=20 * MIB)
            assert came == [came[0]] * len(nodes)
            assert came[0][:4] == content
            content = came[0][4:]


def test_a_state_that_nobody_has_whole_is_lost(pool: RankPool) -> None:
    with pool.job((0, 1), timeout=SECONDS) as job:
        begun(job, MIB)
        for failure in failures(job.start_all(state_programs.nobody_has_a_whole_state)):
            assert isinstance(failure.error, PeerLost)
            assert "no rank has a whole state" in failure.error.message


def late_rank_and_waiting_holder(job: Job, folder: Path) -> list[Call]:
    """Rank 2 pulls 60 MiB; rank 0 serves its share only after the other holder was killed."""
    holder = job.start(0, state_programs.serve_after_the_other, nbytes=60 * MIB, folder=str(folder))
    return [holder, job.start(2, state_programs.come_late, late=[2], nbytes=60 * MIB)]


@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
@pytest.mark.parametrize("blocks", [0, 3])
def test_a_holder_that_dies_is_replaced(
    pool: RankPool, tmp_path: Path, blocks: int, on_loss: str
) -> None:
    """Of a pull of 60 MiB from two holders, one serves so many blocks."""
    with pool.job((0, 1, 2), timeout=SECONDS, on_loss=on_loss) as job:
        content = begun(job, 60 * MIB)
        dying = job.start(1, state_programs.die_while_serving, blocks=blocks, folder=str(tmp_path))
        came = results(late_rank_and_waiting_holder(job, tmp_path))
        assert (tmp_path / "killed").exists()
        assert dying.poll()
        assert [each["content"] for each in came] == [content] * 2


@pytest.mark.long
@pytest.mark.parametrize("on_loss", ["raise", "shrink"])
def test_an_agent_of_a_holder_that_dies_is_replaced(
    pool: RankPool, services: Services, tmp_path: Path, on_loss: str
) -> None:
    with pool.job((0, 1, 2), timeout=SECONDS, on_loss=on_loss) as job:
        content = begun(job, 60 * MIB)
        job.start(
            1,
            state_programs.kill_while_serving,
            pid=services.agents["node1"].pid,
            folder=str(tmp_path),
        )
        came = results(late_rank_and_waiting_holder(job, tmp_path))
        services.kill_agent("node1")  # what is left of it
        assert (tmp_path / "killed").exists()
        assert [each["content"] for each in came] == [content] * 2


def test_ranks_that_made_other_states_are_told_so(pool: RankPool) -> None:
    with pool.job((0, 1), timeout=SECONDS) as job:
        for program, text in (
            (state_programs.sync_with_a_missing_value, "make it of the same names"),
            (state_programs.sync_with_another_shape, "numpy <f8[4] here and numpy <f8[3]"),
        ):
            holder, late = failures(job.start_all(program))
            assert isinstance(late.error, InvalidArgument)
            assert isinstance(holder.error, PeerError)
            assert text in late.error.message
            assert "rank 1: " in holder.error.message
            assert text in holder.error.message
        begun(job, 1000)  # the group is usable
