"""The meeting of ranks in a store that may have been used before. Threads play the ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from allfold.torch._rendezvous import agree_on_name
from allfold_core.errors import PeerMissing, RegisterParamsMismatch

LONG, SHORT = timedelta(seconds=30), timedelta(milliseconds=200)
# Within which those who live have met, however busy the machine is.
MEETING = timedelta(seconds=1.5)


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hash":
        return HashStore()
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


Visit = Callable[..., "Future[str]"]


@pytest.fixture
def visit(store: Any) -> Any:
    with ThreadPoolExecutor(8) as threads:

        def visit(rank: int, size: int, timeout: timedelta = LONG) -> Future[str]:
            own = store.clone() if hasattr(store, "clone") else store
            return threads.submit(agree_on_name, own, rank, size, timeout)

        yield visit


def test_ranks_that_meet_have_one_name(visit: Visit) -> None:
    names = {each.result() for each in [visit(rank, 4) for rank in range(4)]}
    assert len(names) == 1


def test_one_store_serves_one_group_after_the_other(visit: Visit) -> None:
    names = set()
    for _ in range(5):
        (name,) = {each.result() for each in [visit(rank, 3) for rank in range(3)]}
        names.add(name)
    assert len(names) == 5


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_what_a_dead_rank_has_written_misleads_nobody(visit: Visit, dead: int) -> None:
    """An earlier attempt, in which one rank died before it came and the others waited for it."""
    ended = [visit(rank, 3, MEETING) for rank in range(3) if rank != dead]
    for each in ended:
        with pytest.raises(PeerMissing) as caught:
            each.result()
        assert caught.value.details["missing_ranks"] == [dead]
        assert str(caught.value).startswith(f"[AF302 PeerMissing] rank {dead} of 3 did not come")
    assert len({each.result() for each in [visit(rank, 3) for rank in range(3)]}) == 1


def test_a_rank_that_died_after_it_came_is_not_taken_for_its_successor(visit: Visit) -> None:
    with pytest.raises(PeerMissing):
        visit(1, 2, SHORT).result()
    first, second = visit(0, 2), visit(1, 2)
    assert first.result() == second.result()


def test_a_job_can_come_again_with_fewer_ranks(visit: Visit) -> None:
    for rank in (1, 2):
        with pytest.raises(PeerMissing):
            visit(rank, 3, SHORT).result()
    first, second = visit(0, 2), visit(1, 2)
    assert first.result() == second.result()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_disagree_on_the_world_size_are_told_so(
    visit: Visit, sizes: tuple[int, int]
) -> None:
    for coming in [visit(rank, size) for rank, size in enumerate(sizes)]:
        with pytest.raises(RegisterParamsMismatch) as caught:
            coming.result()
        said = f"disagree on its world size: {sizes[0]} on rank 0; {sizes[1]} on rank 1;"
        assert said in str(caught.value)
