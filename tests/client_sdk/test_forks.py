"""Children that a rank forks hold nothing of what it shares with its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import allfold
from allfold_core.errors import AllfoldError
from allfold_core.protocol.rank_messages import MAX_MESSAGE
from tests.support.fakes.fake_agent import FakeAgent

# Its child outlives it, as a worker of a data loader may.
PARENT = """
import os, signal, sys
import allfold
allfold.init(rank=0, world_size=1, agent=sys.argv[1])
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with FakeAgent(tmp_path) as agent:
        yield agent


def test_the_socket_of_a_rank_that_is_killed_ends_though_a_child_of_it_lives(
    agent: FakeAgent,
) -> None:
    command = [sys.executable, "-c", PARENT, agent.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        agent.greet()
        agent.seat()
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            assert agent.connected is not None
            assert agent.connected.recv(MAX_MESSAGE) == b""
        finally:
            os.kill(child, signal.SIGKILL)


def said_by_a_child(use: Callable[[], object], answer: Callable[[], object] = int) -> str:
    """Return what a forked child has to say of a use, or the message of its error.

    Args:
        answer: called in the parent meanwhile.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(use()).encode())
        except AllfoldError as error:
            os.write(writer, error.message.encode())
        finally:
            os._exit(0)
    os.close(writer)
    answer()
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()


def opened(agent: FakeAgent) -> allfold.Group:
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(allfold.init, rank=0, world_size=1, group="g", agent=agent.path)
        agent.greet()
        agent.seat()
        return opening.result(10)


def test_a_child_is_told_to_join_by_itself_whatever_it_does_and_its_parent_goes_on(
    agent: FakeAgent,
) -> None:
    group = opened(agent)
    work = group.all_reduce(np.ones(2), async_op=True)
    op = agent.next_op()
    uses: list[Callable[[], object]] = [
        work.wait,
        lambda: group.all_reduce(np.ones(2)),
        lambda: group.empty(3),
        group.shutdown,
    ]
    for use in uses:
        assert "a forked child is a rank of its own" in said_by_a_child(use)
    assert "allfold.init must be called" in said_by_a_child(allfold.rank)
    agent.conclude(op)
    assert list(work.wait()) == [1, 1]
    agent.__exit__()
    allfold.shutdown()


def test_a_child_that_joins_is_a_rank_of_its_own_with_an_agent_of_its_own(
    agent: FakeAgent, tmp_path: Path
) -> None:
    """Also of a group with the name of its parent's."""
    opened(agent)
    (tmp_path / "of the child").mkdir()
    with FakeAgent(tmp_path / "of the child") as others:

        def join() -> int:
            allfold.init(rank=3, world_size=4, group="g", agent=others.path)
            return allfold.rank()

        def answer() -> None:
            others.greet()
            others.seat()

        assert said_by_a_child(join, answer) == "3"
    assert allfold.rank() == 0
    agent.__exit__()
    allfold.shutdown()
