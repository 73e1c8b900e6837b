"""The end of an op: its result is put in place once, and the tensor is the program's after that."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allfold
from allfold._registry import registry
from allfold_core.errors import AgentLost, PeerLost, RegisterNotFirstOperation
from allfold_core.protocol.rank_messages import Message
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.fakes.page_ranks import Ranks, ranks
from tests.support.waiting import wait_until

LONG = 20_000  # elements of an op that is a message to the agent


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent
        agent.__exit__()
        if allfold.is_initialized():
            allfold.shutdown()


@pytest.fixture
def group(agent: FakeAgent) -> allfold.Group:
    """This process is rank 0 of 2; the agent answers, and does no op."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            allfold.init,
            rank=0,
            world_size=2,
            group="g",
            agent=agent.path,
            init_timeout=10.0,
            timeout=0.1,
        )
        agent.greet()
        agent.seat()
        return opening.result(10)


def started(group: allfold.Group, value: float = 1.0) -> tuple[Any, allfold.Work]:
    tensor = np.full(4, value, np.float32)
    return tensor, group.all_reduce(tensor, async_op=True)


def test_an_op_that_says_it_is_completed_has_its_result_and_writes_no_more(two: Ranks) -> None:
    (tensor, work), _ = started(two.groups[0]), started(two.groups[1])
    assert work.is_completed()
    assert tensor.tolist() == [2.0] * 4
    tensor[...] = 9.0
    assert work.wait() is tensor
    assert tensor.tolist() == [9.0] * 4


def test_results_that_nobody_waits_for_come_without_another_call(two: Ranks) -> None:
    tensors = [started(group)[0] for group in two.groups for _ in range(3)]
    wait_until(lambda: all((each == 2.0).all() for each in tensors), "all results are there")


def test_an_op_that_was_waited_for_copies_out_those_before_it(two: Ranks) -> None:
    for group in two.groups:
        group._channel._ops.watch = lambda: None  # type: ignore[method-assign]

    def program(group: allfold.Group) -> list[float]:
        first, _ = started(group)
        group.barrier()
        second, _ = started(group)
        group.barrier()
        return [*first, *second]

    assert two.all_do(program) == [[2.0] * 8] * 2


def test_an_op_keeps_its_tensor_until_the_result_is_there(two: Ranks) -> None:
    tensor, work = started(two.groups[0])
    kept = weakref.ref(tensor)
    del tensor, work
    assert kept() is not None
    started(two.groups[1])
    wait_until(lambda: kept() is None, "the tensor of an op that is done is free")


def test_an_op_that_is_polled_for_is_one_that_the_agent_looks_at(two: Ranks) -> None:
    _, work = started(two.groups[0])
    told = two.connections[0].told
    wait_until(lambda: work.is_completed() or bool(told), "the agent was asked")
    assert told[0] == (Message.LOOK, {"number": 1, "seq": 0})


def test_an_op_is_over_when_the_agent_is_lost(two: Ranks) -> None:
    _, work = started(two.groups[0])
    assert not work.is_completed()
    two.connections[0].lost = AgentLost("the node agent is gone")
    assert work.is_completed()
    with pytest.raises(AgentLost, match="the node agent is gone"):
        work.wait()


def test_an_op_that_fails_leaves_its_tensor_alone(agent: FakeAgent, group: allfold.Group) -> None:
    tensor = np.ones(LONG)
    work = group.all_reduce(tensor, async_op=True)
    tensor[...] = 9.0
    agent.conclude(agent.next_op(), error=PeerLost("rank 1 is lost"))
    wait_until(work.is_completed, "it has failed")
    assert (tensor == 9.0).all()
    with pytest.raises(PeerLost):
        work.wait()


def test_what_is_in_flight_when_a_group_is_abandoned_is_never_written(
    agent: FakeAgent, group: allfold.Group
) -> None:
    registry.hold("test")  # the connection
    tensor = np.ones(LONG)
    work = group.all_reduce(tensor, async_op=True)
    op = agent.next_op()
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(group.abandon)
        agent.free_seat(agent.next_leave())
        leaving.result(10)
    tensor[...] = 9.0
    agent.conclude(op)
    wait_until(work.is_completed, "its outcome has come")
    with pytest.raises(RegisterNotFirstOperation, match="with the op in flight"):
        work.wait()
    assert (tensor == 9.0).all()
    registry.release("test")


def test_an_op_that_was_given_up_is_not_written_when_the_agent_speaks_again(
    agent: FakeAgent, group: allfold.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allfold._handles.work.GRACE_SECONDS", 0.1)
    tensor = np.ones(LONG)
    work = group.all_reduce(tensor, async_op=True)
    op = agent.next_op()
    with pytest.raises(AgentLost, match="gave no outcome for op 0"):
        work.wait()
    tensor[...] = 9.0
    agent.conclude(op)
    after = group.barrier(async_op=True)
    agent.conclude(agent.next_op())
    wait_until(after.is_completed, "the process has heard of both")
    assert (tensor == 9.0).all()
