"""The connection to the agent: nothing waits forever, nothing is settled twice."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allfold
from allfold._process.settings import socket_path
from allfold._session.in_flight import Lander
from allfold._session.requests import Requests
from allfold_agent.settings import AgentSettings
from allfold_core.errors import (
    AgentLost,
    AgentUnreachable,
    InvalidArgument,
    MultipleUnregister,
    PeerMissing,
)
from allfold_core.protocol.rank_messages import MAX_MESSAGE, Message, OpMessage, Outcome
from tests.support.fakes.fake_agent import FakeAgent

LONG = 60.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent
        while allfold.is_initialized():  # its agent is gone, or will be
            agent.__exit__()
            allfold.shutdown()


def open_group(agent: FakeAgent, name: str = "g", number: int = 0) -> allfold.Group:
    """Join through the fake agent; the first group also connects to it."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(
            allfold.init, rank=0, world_size=1, group=name, agent=agent.path, timeout=LONG
        )
        if agent.connected is None:
            agent.greet()
        agent.seat(number)
        return opening.result(10)


def taken_op(agent: FakeAgent) -> OpMessage:
    """The next op, which is answered later."""
    assert agent.connected is not None
    while (data := agent.connected.recv(MAX_MESSAGE))[0] == Message.SEGMENT:
        continue
    return OpMessage.unpack(data)


def answer(agent: FakeAgent, op: OpMessage) -> None:
    assert agent.connected is not None
    agent.connected.sendall(Outcome(Message.DONE, op.group, op.seq, op.view, 1).pack())


def leave(agent: FakeAgent, group: allfold.Group) -> None:
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(group.shutdown)
        agent.see_off()
        leaving.result(10)


def test_an_agent_that_reads_nothing_any_more_is_given_up(agent: FakeAgent) -> None:
    group = open_group(agent)
    with pytest.raises(AgentLost, match="takes no messages"):
        while True:
            group.membership.session.connection.send(bytes(1000), timeout=0.2)


def test_a_message_for_which_there_is_no_room_is_sent_as_soon_as_there_is(
    agent: FakeAgent,
) -> None:
    group = open_group(agent)
    assert agent.connected is not None
    messages = 2000

    def send_them() -> None:
        for _ in range(messages):
            group.membership.session.connection.send(bytes(1000), LONG)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_them)
        with pytest.raises(TimeoutError):
            sending.result(0.1)  # the queue of a socket is shorter
        for _ in range(messages):
            assert len(agent.connected.recv(MAX_MESSAGE)) == 1000
        sending.result(10)


def test_threads_that_wait_for_ops_get_the_outcome_of_their_own_in_whatever_order(
    agent: FakeAgent,
) -> None:
    group = open_group(agent)
    for _ in range(10):
        works = [group.all_reduce(np.ones(4), async_op=True) for _ in range(4)]
        taken = [taken_op(agent) for _ in works]
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(work.wait, timeout=LONG) for work in works]
            for position in (2, 0, 3, 1):
                answer(agent, taken[position])
                waiting[position].result(10)


def test_one_wait_takes_in_all_the_answers_that_are_there(agent: FakeAgent) -> None:
    group = open_group(agent)
    works = [group.all_reduce(np.ones(4), async_op=True) for _ in range(8)]
    for taken in [taken_op(agent) for _ in works]:
        answer(agent, taken)
    works[0].wait()
    assert agent.connected is not None
    agent.connected.close()  # what has not been taken in by now is not known for long
    assert not group.membership.session.connection.requests.open
    for work in works:
        work.wait()


def test_a_short_wait_is_short_after_a_long_one_and_the_other_way_round(agent: FakeAgent) -> None:
    group = open_group(agent)
    group.all_reduce(np.ones(4), async_op=True)
    slow = group.all_reduce(np.ones(4), async_op=True)
    first, second = taken_op(agent), taken_op(agent)
    with ThreadPoolExecutor(1) as pool:
        for op in (first, second):
            with pytest.raises(PeerMissing, match=r"after 0\.02 s"):
                slow.wait(timeout=0.02)
            waiting = pool.submit(slow.wait)
            answer(agent, op)
    assert list(waiting.result(10)) == [1, 1, 1, 1]


def test_memory_that_torch_took_from_a_tensor_is_neither_written_nor_read(agent: FakeAgent) -> None:
    group = open_group(agent)
    tensor = torch.ones(1 << 16)
    work = group.all_reduce(tensor, async_op=True)
    tensor.untyped_storage().resize_(0)
    answer(agent, taken_op(agent))
    with pytest.raises(InvalidArgument, match="leave it alone until the op is done"):
        work.wait()
    with pytest.raises(InvalidArgument, match="has no memory"):
        group.all_reduce(tensor)


def test_ops_that_differ_in_an_option_or_in_their_shape_alone_have_fingerprints_of_their_own(
    agent: FakeAgent,
) -> None:
    group = open_group(agent)
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(np.ones(4, np.float32), async_op=True),
        lambda: group.all_reduce(np.ones((1, 4), np.float32), async_op=True),
        lambda: group.all_reduce(np.ones(4, np.int32), async_op=True),
        lambda: group.all_reduce(np.ones(4, np.float32), "mean", async_op=True),
        lambda: group.all_reduce(np.ones(4, np.float32), strategy="ring", async_op=True),
        lambda: group.all_reduce(np.ones(4, np.float32), wire="int8", async_op=True),
        lambda: group.all_reduce(
            np.ones(4, np.float32), wire="int8", feedback="one", async_op=True
        ),
        lambda: group.all_reduce(
            np.ones(4, np.float32), wire="int8", feedback="other", async_op=True
        ),
        lambda: group.all_reduce(np.ones(4), "premul_sum", factor=2, async_op=True),
        lambda: group.all_reduce(np.ones(4), "premul_sum", factor=3, async_op=True),
        lambda: group.reduce(np.ones(4), 0, async_op=True),
    ]
    seen = []
    for _ in range(2):
        prints = []
        for call in calls:
            call()
            prints.append(taken_op(agent).fingerprint)
        seen.append(prints)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(calls)


def test_a_process_finds_no_place_in_the_queue_of_an_agent_that_accepts_nobody(
    tmp_path: Path,
) -> None:
    with FakeAgent(tmp_path, backlog=0) as agent, ThreadPoolExecutor(4) as pool:
        attempts = [
            pool.submit(
                allfold.init,
                rank=0,
                world_size=1,
                group=f"g{number}",
                agent=agent.path,
                init_timeout=0.3,
            )
            for number in range(4)
        ]
        for attempt in attempts:
            with pytest.raises(AgentUnreachable):
                attempt.result(20)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e10, 0, -1, "soon"])
def test_a_time_limit_is_a_number_of_seconds_that_a_clock_can_count(
    agent: FakeAgent, timeout: float
) -> None:
    group = open_group(agent)
    with pytest.raises(InvalidArgument, match="positive number of seconds"):
        group.all_reduce(np.ones(4), timeout=timeout)
    assert "positive number of seconds" in agent.abandoned()["reason"]
    with pytest.raises(InvalidArgument, match="timeout is a positive number of seconds"):
        allfold.init(rank=0, world_size=1, group="other", agent=agent.path, timeout=timeout)
    with ThreadPoolExecutor(1) as pool:  # and the next op works
        done = pool.submit(group.all_reduce, np.ones(4))
        agent.finish_op()
        assert list(done.result(10)) == [1, 1, 1, 1]


def test_waiting_for_an_op_may_be_as_patient_as_one_likes(agent: FakeAgent) -> None:
    group = open_group(agent)
    work = group.all_reduce(np.ones(4), async_op=True)
    with pytest.raises(PeerMissing, match="still in flight"):
        work.wait(timeout=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work.wait, timeout=float("inf"))
        agent.finish_op()
        assert list(waiting.result(10)) == [1, 1, 1, 1]


def test_an_op_that_several_threads_wait_for_gives_its_memory_back_once(agent: FakeAgent) -> None:
    group = open_group(agent)
    for _ in range(20):
        tensor = np.ones(1 << 16, np.float32)
        work = group.all_reduce(tensor, async_op=True)
        start = threading.Barrier(5)

        def wait(work: allfold.Work = work, start: threading.Barrier = start) -> object:
            start.wait(10)
            return work.wait()

        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(wait) for _ in range(4)]
            start.wait(10)
            agent.finish_op()
            assert all(each.result(10) is tensor for each in waiting)
    one, other = (group.empty(1 << 16) for _ in range(2))
    assert not np.shares_memory(one, other)
    segments = group.membership.session.arena._segments.values()
    free = sum(length for segment in segments for _, length in segment._free)
    assert free == sum(segment.memory.size for segment in segments) - one.nbytes - other.nbytes


def test_a_group_that_was_left_by_its_own_method_is_no_default_any_more(agent: FakeAgent) -> None:
    first, second = open_group(agent, "first", 0), open_group(agent, "second", 1)
    assert allfold.rank() == first.rank
    leave(agent, first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(allfold.barrier)  # of the second group
        agent.finish_op()
        waiting.result(10)
    again = open_group(agent, "first", 2)
    leave(agent, again)
    leave(agent, second)
    assert not allfold.is_initialized()


def test_others_can_go_on_while_a_connection_is_closed(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing takes a while if the work of a GPU does not end."""
    group = open_group(agent)
    session, said = group.membership.session, []
    close = session.close

    def shutdown() -> None:
        with pytest.raises(MultipleUnregister):
            allfold.shutdown()
        said.append("there is no group any more")

    def close_late() -> None:
        other = threading.Thread(target=shutdown, daemon=True)
        other.start()
        other.join(5)
        said.append("closed")
        close()

    monkeypatch.setattr(session, "close", close_late)
    leave(agent, group)
    assert said == ["there is no group any more", "closed"]


@pytest.mark.parametrize("runtime", ["there", "gone", ""])
def test_the_agent_and_its_ranks_look_for_each_other_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str
) -> None:
    monkeypatch.delenv("ALLFOLD_SOCKET", raising=False)
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/{runtime}" if runtime else "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / ("there/allfold" if runtime == "there" else f"allfold-{os.getuid()}")
    assert AgentSettings().socket == socket_path() == f"{place}/agent.sock"


def test_a_socket_that_is_no_agents_is_no_place_to_wait_for_ever(tmp_path: Path) -> None:
    path = str(tmp_path / "mute")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(path)
        mute.listen(8)
        with pytest.raises(AgentUnreachable, match="does not answer"):
            allfold.init(rank=0, world_size=1, agent=path, init_timeout=0.2)


def test_an_outcome_is_not_lost_though_handlers_of_signals_raise_amid_it_again_and_again(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = open_group(agent)
    work = group.all_reduce(np.ones(4), async_op=True)
    answer(agent, taken_op(agent))
    interrupts = iter([KeyboardInterrupt, TimeoutError, KeyboardInterrupt])
    dispatch = Requests.dispatch

    def interrupted(*given: Any, **named: Any) -> None:
        if interrupt := next(interrupts, None):
            raise interrupt
        dispatch(*given, **named)

    with monkeypatch.context() as patched:
        # The thread that sees to results would come in between.
        patched.setattr(Lander, "_look", lambda *_given, **_named: None)
        patched.setattr(Requests, "dispatch", interrupted)
        for expected in (KeyboardInterrupt, TimeoutError, KeyboardInterrupt):
            with pytest.raises(expected):
                work.wait()
        work.wait()
    leave(agent, group)
