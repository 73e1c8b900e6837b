"""A process that dies is gone, also where a child of it holds its socket open."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from allfold_agent.local.listener import Listener
from allfold_agent.local.rank_connection import RankConnection
from allfold_agent.runtime.reactor import Reactor
from tests.support.descriptors import descriptors
from tests.support.waiting import wait_until

MESSAGES = 5

# Says hello; what it says next is queued when it dies, and its child lives on.
RANK = """
import os, socket, subprocess, sys
ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.connect(sys.argv[1])
ours.send(b"hello")
ours.recv(100)
for number in range(5):
    ours.send(b"%d" % number)
child = subprocess.Popen(["sleep", "600"], pass_fds=[ours.fileno()], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


class Served:
    """A listener that answers the first message of a process, and watches it from then on."""

    def __init__(self, path: str, reactor: Reactor) -> None:
        self.taken: list[bytes] = []
        self.gone: SimpleQueue[int] = SimpleQueue()
        self.may_go_on = Event()
        self.reactor = reactor
        self.listener = Listener(path, reactor, self._take, lambda rank: self.gone.put(rank.pid))

    def _take(self, process: RankConnection, data: bytes, _: list[int]) -> None:
        self.taken.append(data)
        if data == b"hello":
            self.listener.watch(process)
            self.reactor.call(self._wait)
            process.send(b"welcome")

    def _wait(self) -> None:
        """Keep the reactor busy, so that what comes is there when it looks again."""
        self.may_go_on.wait(30.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    reactor = Reactor("test-ends")
    served = Served(str(tmp_path / "agent.sock"), reactor)
    reactor.start()
    yield served
    served.may_go_on.set()
    reactor.close()
    served.listener.close()


@contextmanager
def rank_with_a_child(path: str) -> Iterator[subprocess.Popen[Any]]:
    command = [sys.executable, "-c", RANK, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        try:
            yield rank
        finally:
            rank.kill()
            os.kill(child, signal.SIGKILL)


def test_what_a_process_sent_before_it_was_killed_is_taken_in_and_then_it_is_gone(
    served: Served, tmp_path: Path
) -> None:
    with rank_with_a_child(str(tmp_path / "agent.sock")) as rank:
        rank.kill()
        rank.wait(10.0)
        served.may_go_on.set()
        assert served.gone.get(timeout=10.0) == rank.pid
        assert served.taken == [b"hello", *(b"%d" % number for number in range(MESSAGES))]
        assert not served.listener.processes


def test_a_process_that_ends_by_itself_is_gone_once_and_leaves_no_descriptor(
    served: Served, tmp_path: Path
) -> None:
    served.may_go_on.set()
    before = descriptors(os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(tmp_path / "agent.sock"))
        rank.send(b"hello")
        assert rank.recv(100) == b"welcome"
        process = weakref.ref(served.listener.processes[0])
    assert served.gone.get(timeout=10.0) == os.getpid()
    wait_until(lambda: descriptors(os.getpid()) == before, "all is closed")
    served.reactor.call(lambda: None)  # which has forgotten what it did last when it has done this
    wait_until(lambda: process() is None, "it is forgotten")
    assert served.gone.empty()


def test_a_process_whose_end_cannot_be_seen_is_gone_when_its_socket_ends(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another container has no number here."""
    monkeypatch.setattr("allfold_agent.local.rank_connection._peer_pid", lambda _: 0)
    served.may_go_on.set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect(str(tmp_path / "agent.sock"))
        rank.send(b"hello")
        assert rank.recv(100) == b"welcome"
        assert served.gone.empty()
    assert served.gone.get(timeout=10.0) == 0
