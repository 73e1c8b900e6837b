"""A rank that is told to leave does so at its next collective, and ends with status 0."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np
import pytest

import allfold
from allfold import _registry
from allfold_core.errors import InvalidArgument
from tests.support.fakes.fake_agent import FakeAgent
from tests.support.waiting import wait_until

T = TypeVar("T")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    """An agent; whatever a test leaves open ends with it."""
    with FakeAgent(tmp_path) as agent:
        yield agent
        if allfold.is_initialized():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(agent.see_off)
                allfold.shutdown()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def meanwhile(there: Callable[[], T], here: Callable[[], object]) -> T:
    """Do something here, in the main thread, while an agent does its part; return its result."""
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(there)
        here()
        return answering.result(10.0)


def join(
    agent: FakeAgent, *, elastic: bool = True, again: bool = False, joins: str = "any"
) -> allfold.Group:
    """Open a group of two, this process is rank 0."""
    opened: list[allfold.Group] = []

    def answer() -> None:
        if not again:
            agent.greet()
        agent.seat(number=len(_registry.registry))

    def open_it() -> None:
        name = f"g{len(_registry.registry)}"
        most = 4 if elastic else None
        group = _registry.open_group(name, 0, 2, agent=agent.path, max_world=most, joins=joins)
        opened.append(group)

    meanwhile(answer, open_it)
    return opened[0]


def leaves(agent: FakeAgent, call: Callable[[], object]) -> str:
    """Check that a call leaves the one group of this process; return how the others hear of it."""

    def calls() -> None:
        with pytest.raises(allfold.Drained) as caught:
            call()
        assert caught.value.code == 0

    request = meanwhile(agent.see_off, calls)
    assert not request["failed"]
    assert not request["lost"]
    return str(request["how"])


def test_a_rank_that_gets_sigterm_leaves_at_its_next_collective(agent: FakeAgent) -> None:
    group = join(agent)
    meanwhile(agent.finish_op, group.barrier)
    assert not group.should_leave
    signal.raise_signal(signal.SIGTERM)
    assert group.should_leave
    assert leaves(agent, group.barrier) == "left the group, as it got SIGTERM"
    assert not allfold.is_initialized()


def test_what_comes_after_it_has_left_ends_the_program_too(agent: FakeAgent) -> None:
    """As in ``finally: allfold.shutdown()``, or where another thread calls a collective."""
    group = join(agent)
    signal.raise_signal(signal.SIGTERM)
    leaves(agent, group.barrier)
    allfold.shutdown()
    group.shutdown()
    with pytest.raises(allfold.Drained):
        group.all_reduce(np.ones(4))


def test_what_was_called_before_is_done_before_it_leaves(agent: FakeAgent) -> None:
    group = join(agent)
    work = group.all_reduce(np.ones(4), async_op=True)
    signal.raise_signal(signal.SIGTERM)

    def finish_and_see_off() -> None:
        agent.finish_op()
        agent.see_off()

    def calls() -> None:
        with pytest.raises(allfold.Drained):
            group.barrier()

    meanwhile(finish_and_see_off, calls)
    assert work.participants == 1


def test_a_rank_leaves_all_its_groups(agent: FakeAgent) -> None:
    elastic, other = join(agent), join(agent, elastic=False, again=True)
    signal.raise_signal(signal.SIGTERM)
    meanwhile(agent.finish_op, other.barrier)  # nobody can leave this one between its ops

    def see_both_off() -> list[int]:
        return [agent.see_off()["number"] for _ in range(2)]

    def calls() -> None:
        with pytest.raises(allfold.Drained):
            elastic.barrier()

    assert meanwhile(see_both_off, calls) == [0, 1]


def test_a_rank_whose_node_drains_hears_of_it_with_the_next_outcome(agent: FakeAgent) -> None:
    group = join(agent)
    agent.drain("node a drains")
    meanwhile(agent.finish_op, group.barrier)
    assert leaves(agent, group.barrier) == "left the group, as node a drains"


def test_a_process_that_is_asked_to_leave_before_it_is_in_leaves_once_it_is(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said of its groups until then: it has none."""
    opened: list[allfold.Group] = []

    def answer() -> None:
        agent.greet()
        agent.drain("node a drains")
        agent.seat(number=0)

    meanwhile(
        answer,
        lambda: opened.append(_registry.open_group("g", 0, 2, agent=agent.path, max_world=4)),
    )
    assert [each for each in caplog.messages if "drains" in each] == []
    assert leaves(agent, opened[0].barrier) == "left the group, as node a drains"


def test_a_program_that_looks_hears_of_it_without_an_op(agent: FakeAgent) -> None:
    group = join(agent)
    agent.drain("node a drains")
    wait_until(lambda: group.should_leave, "it has heard")
    leaves(agent, group.barrier)


def test_a_rank_that_leaves_as_its_node_drains_says_so(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with status 0, and would else end without a word."""
    group = join(agent)
    agent.drain("node a drains")
    wait_until(lambda: group.should_leave, "it has heard")
    leaves(agent, group.barrier)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told == ["this process leaves its groups at the next boundary, as node a drains"]


def test_where_all_commit_a_rank_asks_once_to_be_let_go_and_goes_on(agent: FakeAgent) -> None:
    group = join(agent, joins="commit")
    signal.raise_signal(signal.SIGTERM)

    def finish_ops() -> None:
        agent.see_wish_to_leave()
        agent.finish_op()
        agent.finish_op()

    def call() -> None:
        group.barrier()
        group.boundary()
        group.barrier()

    meanwhile(finish_ops, call)
    assert group.should_leave


def test_a_rank_of_a_fixed_group_stays_and_says_so(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    group = join(agent, elastic=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    agent.drain("node a drains")
    for _ in range(2):
        meanwhile(agent.finish_op, group.barrier)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told == ["node a drains; this process goes on, as none of its groups is elastic"]
    assert group.should_leave
    with pytest.raises(InvalidArgument, match="group 'g0' is not elastic"):
        group.drain()


def test_a_program_with_a_handler_of_its_own_keeps_it_and_can_drain(agent: FakeAgent) -> None:
    groups: list[allfold.Group] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        groups[0].drain()

    signal.signal(signal.SIGTERM, handle)
    try:
        groups.append(join(agent))
        assert signal.getsignal(signal.SIGTERM) is handle
        signal.raise_signal(signal.SIGTERM)
        assert leaves(agent, groups[0].barrier) == "left the group, as the program asked for it"
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_thread_that_opens_a_group_changes_no_handler(agent: FakeAgent) -> None:
    thread = threading.Thread(target=join, args=(agent,))
    thread.start()
    thread.join(10.0)
    assert allfold.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_process_that_has_left_may_join_anew(agent: FakeAgent) -> None:
    group = join(agent)
    signal.raise_signal(signal.SIGTERM)
    leaves(agent, group.barrier)
    assert agent.connected is not None
    agent.connected.close()
    group = join(agent)
    assert not group.should_leave
    meanwhile(agent.finish_op, group.barrier)


# With processes of their own, as SIGTERM ends them

PREAMBLE = """
import os, signal, sys, time
from allfold import _registry
group = _registry.open_group("g", 0, 1, agent=sys.argv[1], max_world=1)
"""


def started(agent: FakeAgent, text: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-c", PREAMBLE + text, agent.path]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    agent.greet()
    agent.seat()
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_sigterm_ends_the_process_at_once(agent: FakeAgent) -> None:
    text = "signal.raise_signal(15); print('lives'); signal.raise_signal(15); time.sleep(600)"
    with started(agent, text) as process:
        assert line_of(process) == "lives"
        assert process.wait(30.0) == -signal.SIGTERM


def test_a_forked_child_ends_at_sigterm(agent: FakeAgent) -> None:
    text = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print('here')\n"
        "    while True: signal.pause()\n"
        "sys.stdin.readline()\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    with started(agent, text) as process:
        assert line_of(process) == "here"
        assert process.stdin is not None
        process.stdin.write("kill it\n")
        process.stdin.flush()
        assert line_of(process) == str(-signal.SIGTERM)
        process.kill()


def test_blocks_run_and_the_status_is_0(agent: FakeAgent) -> None:
    text = (
        "try:\n"
        "    signal.raise_signal(15)\n"
        "    group.barrier()\n"
        "except Exception:\n"
        "    print('caught')\n"
        "finally:\n"
        "    group.shutdown()\n"
        "    print('cleaned up')\n"
    )
    with started(agent, text) as process:
        agent.see_off()
        assert line_of(process) == "cleaned up"
        assert process.wait(30.0) == 0
