"""Ops that nobody can decide for the moment: who waits hears so, and gets the outcome later."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allfold
from allfold._handles.work import wait_for_any
from allfold_core.errors import PeerLost, PeerMissing, from_dict
from allfold_core.protocol.rank_messages import MAX_MESSAGE, OpMessage
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until

TIMEOUT = 30.0


class Clock:
    """The time that the SDK's deadlines go by."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("_handles.work", "_epochs"):
        monkeypatch.setattr(f"allfold.{module}.monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent
        agent.__exit__()
        allfold.shutdown()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def group(agent: FakeAgent, pool: ThreadPoolExecutor) -> allfold.Group:
    opening = pool.submit(
        allfold.init,
        rank=0,
        world_size=2,
        group="g",
        agent=agent.path,
        init_timeout=10.0,
        timeout=TIMEOUT,
    )
    agent.greet()
    agent.seat()
    return opening.result(10)


def hold(agent: FakeAgent, group: allfold.Group, clock: Clock, now: float) -> None:
    """Have the process hear, at a time, that its group waits."""
    clock.now = now
    agent.hold(now)
    wait_until(lambda: group.membership.epochs.held_at == now, "it has heard so")


def next_op(agent: FakeAgent, group: allfold.Group) -> OpMessage:
    """The next op, once the process waits for it: its time runs from then on."""
    op = agent.next_op()
    waited_for = group._channel.in_flight
    wait_until(lambda: any(f"op {op.seq} " in repr(work) for work in waited_for()), "it waits")
    return op


def error_of(waiting: Future[Any]) -> PeerMissing:
    error = waiting.exception(10)
    assert isinstance(error, PeerMissing)
    return error


def test_a_wait_is_patient_for_one_more_timeout_and_then_says_what_the_group_waits_for(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    work = group.barrier(async_op=True)
    op = next_op(agent, group)
    waiting = pool.submit(work.wait)
    hold(agent, group, clock, 1.0)
    hold(agent, group, clock, 2 * TIMEOUT - 1)
    assert not waiting.done()
    hold(agent, group, clock, 2 * TIMEOUT)
    error = error_of(waiting)
    assert not error.decided
    assert error.details["waits_for"] == "node-b to answer"
    assert "op 0 of group 'g', with a timeout of 30 s, is not decided" in error.message
    assert "waits for node-b to answer, for 60 s now" in error.message
    assert error.work is work
    assert not work.is_completed()
    agent.conclude(op)
    work.wait()


def test_the_next_wait_for_it_is_patient_again_and_returns_the_outcome(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    work = group.all_reduce(np.arange(3.0), async_op=True)
    op = next_op(agent, group)
    waiting = pool.submit(work.wait)
    hold(agent, group, clock, 2 * TIMEOUT)
    error_of(waiting)
    again = pool.submit(work.wait)
    hold(agent, group, clock, 3 * TIMEOUT - 1)
    assert not again.done()
    hold(agent, group, clock, 3 * TIMEOUT)
    error_of(again)
    last = pool.submit(work.wait)
    agent.conclude(op)
    assert last.result(10).tolist() == [0.0, 1.0, 2.0]


def test_a_call_that_waits_itself_leaves_a_handle_to_wait_again(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    tensor = np.arange(3.0)
    calling = pool.submit(group.all_reduce, tensor)
    op = next_op(agent, group)
    hold(agent, group, clock, 2 * TIMEOUT)
    error = error_of(calling)
    agent.announce(1, rank=0, world_size=1)
    agent.conclude(op, epoch=1)
    assert error.work.wait() is tensor
    assert group.world_size == 1


def test_an_open_op_may_fail_in_the_end(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    calling = pool.submit(group.barrier)
    op = next_op(agent, group)
    hold(agent, group, clock, 2 * TIMEOUT)
    error = error_of(calling)
    agent.conclude(op, error=PeerLost("node-b is lost"))
    with pytest.raises(PeerLost, match="node-b is lost"):
        error.work.wait()


def test_the_next_call_may_be_made_while_one_is_open(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    calling = pool.submit(group.barrier)
    first = next_op(agent, group)
    hold(agent, group, clock, 2 * TIMEOUT)
    error = error_of(calling)
    next_call = pool.submit(group.barrier)
    second = next_op(agent, group)
    hold(agent, group, clock, 2 * TIMEOUT + 1)
    assert not next_call.done(), "it has a timeout of its own"
    for op in (first, second):
        agent.conclude(op)
    next_call.result(10)
    error.work.wait()


def test_what_watches_an_op_hears_of_it_as_soon_as_a_wait_would(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    """So a future of torch fails, too."""
    work = group.barrier(async_op=True)
    op = next_op(agent, group)
    watching = pool.submit(wait_for_any, [work], 10.0)
    hold(agent, group, clock, TIMEOUT)
    hold(agent, group, clock, 2 * TIMEOUT)
    assert watching.result(10) == [work]
    assert work.is_overdue()
    with pytest.raises(PeerMissing):
        work.wait()
    assert not work.is_overdue()
    agent.conclude(op)
    work.wait()


def test_a_message_that_nobody_can_decide_stays_open_as_an_op_does(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    work = group.send(np.ones(1), 1, async_op=True)
    assert agent.connected is not None
    agent.connected.recv(MAX_MESSAGE)
    waiting = pool.submit(work.wait)
    hold(agent, group, clock, 2 * TIMEOUT - 1)
    assert not waiting.done()
    hold(agent, group, clock, 2 * TIMEOUT)
    error = error_of(waiting)
    assert not error.decided
    assert error.work is work
    assert "message 0 of group 'g', with a timeout of 30 s, is not decided" in error.message


def test_a_group_that_is_not_held_any_more_decides_soon(
    agent: FakeAgent, group: allfold.Group, clock: Clock, pool: ThreadPoolExecutor
) -> None:
    work = group.barrier(async_op=True)
    op = next_op(agent, group)
    watching = pool.submit(work.settle_within, 0.2)
    hold(agent, group, clock, 2 * TIMEOUT - 4)
    watching.result(10)
    clock.now = 2 * TIMEOUT
    assert not work.is_overdue()
    agent.conclude(op)
    work.wait()


def test_only_an_error_that_says_so_leaves_an_op_open() -> None:
    said = PeerMissing("a", decided=False)
    assert not from_dict(said.to_dict()).decided  # type: ignore[attr-defined]
    assert PeerMissing("rank 1 did not come").decided
