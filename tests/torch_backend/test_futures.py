"""Futures of ops, completed by a thread, with an agent that answers when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import allfold
from allfold._handles import work as _work
from allfold.torch._progress import FutureProgress
from allfold.torch._work import Work
from allfold.torch.hook import HookState
from allfold_core.errors import AllfoldError
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent


@pytest.fixture
def group(agent: FakeAgent) -> Iterator[allfold.Group]:
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            allfold.init, rank=0, world_size=1, group="g", agent=agent.path, timeout=0.1
        )
        agent.greet()
        agent.seat()
        group = opening.result(10)
    yield group
    agent.__exit__()
    if allfold.is_initialized():
        allfold.shutdown(group)


@pytest.fixture(params=[True, False], ids=["ordered", "unordered"])
def progress(request: pytest.FixtureRequest) -> Iterator[FutureProgress]:
    progress = FutureProgress("progress", ordered=request.param)
    yield progress
    progress.close(5.0)
    wait_until(lambda: _threads() == [], "the thread ends")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "progress"]


def _works(group: allfold.Group, progress: FutureProgress, count: int) -> list[Work]:
    tensors = [torch.full((2,), float(each)) for each in range(count)]
    return [
        Work([group.all_reduce(tensor, async_op=True)], [tensor], progress, explain=_leave_as_is)
        for tensor in tensors
    ]


def _leave_as_is(error: AllfoldError) -> None:
    """Leave an error unexplained: the agent of these tests answers in full."""


def test_futures_complete_while_nobody_waits(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    works = _works(group, progress, 3)
    assert _threads() == []
    futures = [work.get_future() for work in works]
    assert futures[0] is works[0].get_future()
    for done in range(3):
        assert not futures[done].done()
        agent.finish_op()
        wait_until(futures[done].done, f"future {done} is completed")
    assert [future.value()[0].tolist() for future in futures] == [[0, 0], [1, 1], [2, 2]]


def test_a_callback_may_wait_for_another_future(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    first, second = _works(group, progress, 2)
    waited = first.get_future().then(lambda _: second.get_future().wait())
    agent.finish_op()
    agent.finish_op()
    assert waited.wait()[0].tolist() == [1, 1]


def test_a_future_of_several_ops_keeps_its_place(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    several, one = _works(group, progress, 2)
    last = group.all_reduce(torch.zeros(1), async_op=True)
    order: list[str] = []
    both = progress.future([*several._ops, last], lambda: order.append("several"))
    after = one.get_future().then(lambda _: order.append("one"))
    for _ in range(3):
        agent.finish_op()
    both.wait()
    after.wait()
    assert not progress._ordered or order == ["several", "one"]


def test_a_future_of_what_is_done_needs_no_thread(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    (work,) = _works(group, progress, 1)
    agent.finish_op()
    work.wait()
    assert work.get_future().done()
    assert _threads() == []


def test_a_thread_that_nobody_needs_ends_and_comes_back_on_demand(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    for _ in range(2):
        future = _works(group, progress, 1)[0].get_future()
        assert _threads() == ["progress"]
        agent.finish_op()
        future.wait()
        wait_until(lambda: _threads() == [], "the thread ends")


def test_models_that_are_gone_leave_no_threads(agent: FakeAgent, group: allfold.Group) -> None:
    before = set(threading.enumerate())
    for _ in range(10):
        state = HookState(group)
        gradients = torch.ones(2)
        future = state.future(group.all_reduce(gradients, async_op=True), gradients)
        agent.finish_op()
        future.wait()
        del state, future
    wait_until(lambda: set(threading.enumerate()) <= before, "their threads end")


def test_a_future_fails_with_the_agent(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    future = _works(group, progress, 1)[0].get_future()
    agent.__exit__()
    with pytest.raises(RuntimeError, match=r"AgentLost.*is gone|closed the connection"):
        future.wait()


def test_a_future_fails_when_the_agent_gives_no_outcome(
    agent: FakeAgent,
    group: allfold.Group,
    progress: FutureProgress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_work, "GRACE_SECONDS", 0.1)
    future = _works(group, progress, 1)[0].get_future()
    with pytest.raises(RuntimeError, match=r"AgentLost.*it may be stopped"):
        future.wait()


def test_the_thread_ends_when_the_session_is_closed(
    agent: FakeAgent, group: allfold.Group, progress: FutureProgress
) -> None:
    future = _works(group, progress, 1)[0].get_future()
    wait_until(lambda: _threads() == ["progress"], "the thread runs")
    group.abandon()
    with pytest.raises(RuntimeError, match="the session was closed"):
        future.wait()
