"""The meeting of ranks in a store that may have been used before. Threads play the ranks.

Rank 0 may offer services that the job has started for itself, or have a reason why there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from allfold.torch._rendezvous import Take, follow, lead
from allfold_core.errors import (
    AgentUnreachable,
    AllfoldError,
    InvalidArgument,
    PeerMissing,
    RegisterParamsMismatch,
)

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

        def visit(
            rank: int,
            size: int,
            timeout: timedelta = LONG,
            *,
            offer: dict[str, str] | None = None,
            failure: AllfoldError | None = None,
            take: Take = lambda offer: None,
        ) -> Future[str]:
            own = store.clone() if hasattr(store, "clone") else store
            if rank == 0:
                return threads.submit(lead, own, size, timeout, offer, failure)
            return threads.submit(follow, own, rank, size, timeout, take)

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


# --- the services that rank 0 offers

OFFER = {"orchestrator": "http://10.0.0.1:7400", "token": "of this job"}


def refuse(_offer: object) -> None:
    raise AgentUnreachable("rank 1 is on an island")


def failure_of(coming: Future[str]) -> AllfoldError:
    with pytest.raises(AllfoldError) as caught:
        coming.result()
    return caught.value


def test_what_rank_0_offers_reaches_every_other_rank_once(visit: Visit) -> None:
    heard: list[dict[str, str] | None] = []
    others = [visit(rank, 4, take=heard.append) for rank in (1, 2, 3)]
    names = {each.result() for each in [visit(0, 4, offer=OFFER), *others]}
    assert heard == [OFFER] * 3
    assert len(names) == 1


def test_where_nothing_is_offered_the_others_are_told_so(visit: Visit) -> None:
    heard: list[dict[str, str] | None] = []
    other = visit(1, 2, take=heard.append)
    assert visit(0, 2).result() == other.result()
    assert heard == [None]


def test_a_rank_that_cannot_take_the_offer_fails_at_once_and_all_others_with_its_reason(
    visit: Visit,
) -> None:
    began = monotonic()
    island = visit(1, 3, take=refuse)
    others = [visit(0, 3, offer=OFFER), visit(2, 3)]
    for coming in [island, *others]:
        error = failure_of(coming)
        assert type(error) is AgentUnreachable
        assert error.message == "rank 1 is on an island"
    assert monotonic() - began < LONG.total_seconds() / 2


def test_a_refusal_is_of_its_attempt_alone(visit: Visit) -> None:
    refused = [visit(0, 2, offer=OFFER), visit(1, 2, take=refuse)]
    for coming in refused:
        failure_of(coming)
    first, second = visit(0, 2, offer=OFFER), visit(1, 2)
    assert first.result() == second.result()


def test_why_rank_0_has_no_services_is_told_to_those_who_come_early_or_late(visit: Visit) -> None:
    """Of the kind that rank 0 has met; nobody takes anything."""
    began = monotonic()
    reason = InvalidArgument("ALLFOLD_START is one of auto, always, never, got 'x'")
    taken: list[object] = []
    early = visit(1, 3, take=taken.append)
    first = visit(0, 3, failure=reason)
    assert failure_of(early).message == reason.message
    late = visit(2, 3, take=taken.append)
    for coming in (first, late):
        error = failure_of(coming)
        assert type(error) is InvalidArgument
        assert error.message == reason.message
    assert taken == []
    assert monotonic() - began < LONG.total_seconds() / 2


def test_rank_0_fails_with_its_own_reason_also_where_nobody_comes(visit: Visit) -> None:
    reason = AgentUnreachable("no services here")
    assert failure_of(visit(0, 2, SHORT, failure=reason)) is reason
