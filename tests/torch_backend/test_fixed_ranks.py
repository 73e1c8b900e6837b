"""A torch group keeps the ranks that it was made with: a loss is its end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from allfold.torch._creation import create
from allfold.torch._process_group import ProcessGroup
from allfold_core.errors import (
    AgentLost,
    Evicted,
    InvalidArgument,
    PeerLost,
    RootLost,
    WorldChanged,
)
from tests.support.fakes.fake_agent import FakeAgent

LOST = PeerLost("rank 2 is lost")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAgent]:
    monkeypatch.setenv("ALLFOLD_ON_LOSS", "shrink")
    monkeypatch.setenv("ALLFOLD_MIN_WORLD", "2")
    monkeypatch.setenv("ALLFOLD_MAX_WORLD", "8")
    with FakeAgent(tmp_path) as agent:
        monkeypatch.setenv("ALLFOLD_SOCKET", agent.path)
        yield agent


@pytest.fixture
def group(agent: FakeAgent) -> Iterator[ProcessGroup]:
    """Rank 1 of 3, says the agent; torch's store knows of no other."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(create, HashStore(), 0, 1, timedelta(seconds=30))
        agent.greet()
        asked = agent.seat(as_rank=1, of_ranks=3)
        told = (asked["on_loss"], asked["min_world"], asked["max_world"])
        assert told == ("raise", 1, None), "whatever variables say"
        group = opening.result(20)
    yield group
    agent.__exit__()
    group.abort()


def test_ranks_and_calls_stay_those_of_the_beginning_after_a_loss(
    agent: FakeAgent, group: ProcessGroup
) -> None:
    for _ in range(2):
        work = group.barrier()
        op = agent.next_op()
        assert op.view == 0, "agents fail what is called as if nothing had happened"
        agent.announce(1, rank=1, world_size=2)
        agent.conclude(op, epoch=1, error=LOST)
        with pytest.raises(PeerLost, match="rank 2 is lost"):
            work.wait()
        assert (group.rank(), group.size()) == (1, 3)
        assert (group.getRank(), group.getSize()) == (1, 3)
    group.broadcast([torch.ones(1)], _root(2))
    assert agent.next_op().view == 0


def test_of_ops_that_torch_starts_together_the_others_are_called_if_one_cannot_be(
    agent: FakeAgent, group: ProcessGroup
) -> None:
    """All ranks start all of them: one fewer here, and this rank would be one behind for ever."""
    tensors = [torch.ones(1, dtype=torch.float64).expand(2), torch.ones(2)]
    with pytest.raises(InvalidArgument, match="share one place in memory"):
        group.allreduce_coalesced(tensors)
    refused, op = agent.abandoned(), agent.next_op()
    assert (refused["seq"], op.seq) == (0, 1)


@pytest.mark.parametrize("lost", [PeerLost, RootLost, WorldChanged])
def test_the_error_of_a_loss_says_what_users_of_torch_can_do(
    agent: FakeAgent, group: ProcessGroup, lost: type[PeerLost]
) -> None:
    """Not that the group is usable, as it is for others."""
    work = group.barrier()
    agent.conclude(agent.next_op(), epoch=0, error=lost("rank 2 is lost"))
    with pytest.raises(lost) as raised:
        work.wait()
    assert "make a new group of the ranks that are left, or let torchrun" in str(raised.value)
    assert "usable" not in str(raised.value)


def test_a_rank_that_was_evicted_is_not_told_to_go_on_with_the_others(
    agent: FakeAgent, group: ProcessGroup
) -> None:
    work = group.barrier()
    agent.conclude(agent.next_op(), epoch=0, error=Evicted("the group goes on without node b"))
    with pytest.raises(Evicted) as raised:
        work.wait()
    assert "let torchrun start them anew" in str(raised.value)
    assert "ranks that are left" not in str(raised.value)


def test_a_rank_whose_agent_died_is_told_what_users_of_torch_can_do_and_once_only(
    agent: FakeAgent, group: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    work = group.barrier()
    agent.next_op()
    agent.__exit__()
    with pytest.raises(AgentLost) as raised:
        work.wait()
    assert "let torchrun start them anew" in str(raised.value)
    assert "shutdown and init" not in str(raised.value)
    group.abort()
    (left,) = [each.getMessage() for each in caplog.records if "without an answer" in each.msg]
    assert left.endswith("the ops in flight are lost"), "and no advice, which the error has"


def _root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options
