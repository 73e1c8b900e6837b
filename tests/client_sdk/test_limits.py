"""The limit of how far a rank may run ahead of its agent, and whose numbers of ranks count."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import allfold
from allfold_core.errors import InvalidArgument
from allfold_core.protocol.rank_messages import (
    MAX_MESSAGE,
    MAX_OPEN_OPS,
    Message,
    OpMessage,
    Outcome,
)
from tests.support.fakes.fake_agent import FakeAgent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent
        agent.__exit__()
        allfold.shutdown()


def open_group(agent: FakeAgent, rank: int = 0, world_size: int = 1, **seat: int) -> allfold.Group:
    with ThreadPoolExecutor(1) as pool:
        opening: Future[allfold.Group] = pool.submit(
            allfold.init, rank=rank, world_size=world_size, agent=agent.path, init_timeout=10.0
        )
        agent.greet()
        agent.seat(**seat)
        return opening.result(10)


def taken_op(agent: FakeAgent) -> OpMessage:
    assert agent.connected is not None
    while (data := agent.connected.recv(MAX_MESSAGE))[0] == Message.SEGMENT:
        continue
    return OpMessage.unpack(data)


def answer(agent: FakeAgent, op: OpMessage) -> None:
    assert agent.connected is not None
    agent.connected.sendall(Outcome(Message.DONE, op.group, op.seq, op.view, 1).pack())


def test_a_rank_that_never_waits_is_held_back_until_its_oldest_op_is_done(
    agent: FakeAgent,
) -> None:
    group = open_group(agent)

    def never_waits() -> None:
        works = [group.barrier(async_op=True) for _ in range(MAX_OPEN_OPS + 1)]
        for work in works:
            work.wait()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(never_waits)
        ops = [taken_op(agent) for _ in range(MAX_OPEN_OPS)]
        assert agent.connected is not None
        agent.connected.settimeout(0.2)
        with pytest.raises(TimeoutError):
            taken_op(agent)
        agent.connected.settimeout(10.0)
        answer(agent, ops[0])
        last = taken_op(agent)
        assert last.seq == MAX_OPEN_OPS
        for op in (*ops[1:], last):
            answer(agent, op)
        done.result(10)


def test_one_message_too_many_is_refused_and_those_in_flight_go_on(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold._channel.MAX_OPEN_MESSAGES", 3)
    group = open_group(agent, world_size=2)
    works = [group.send(np.ones(1), 1, async_op=True) for _ in range(3)]
    with pytest.raises(InvalidArgument, match="rank 0 has 3 sends and receives in flight"):
        group.send(np.ones(1), 1)
    assert not any(work.is_completed() for work in works)


def test_rank_and_world_size_are_those_that_the_agent_reports(agent: FakeAgent) -> None:
    group = open_group(agent, rank=2, world_size=4, as_rank=1, of_ranks=3)
    assert (group.rank, group.world_size) == (1, 3)
    assert (allfold.rank(), allfold.world_size()) == (1, 3)
    with pytest.raises(InvalidArgument, match="root 3 is not a rank"):
        group.broadcast(np.ones(1), root=3)
