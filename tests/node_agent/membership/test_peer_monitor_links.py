"""A peer monitor on real links: to processes that stop or die, and over lines that break."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allfold_cluster.environment import free_address
from allfold_core.survival import suspicion
from tests.node_agent.membership.link_nodes import SECONDS, Node, Wire, link, nodes
from tests.node_agent.membership.link_peer import Kinds, Peer, watched
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


@contextmanager
def linked_with_a_process() -> Iterator[tuple[Node, Kinds, Peer]]:
    """This process is node ``a``, which watches the process of node ``b``."""
    with nodes("a") as (a,), Peer("b") as b:
        suspicions = Kinds()
        watched(a, suspicions)
        a.links.want("b", b.address, "life-1")
        b.meet({"a": a.address})
        a.await_event("up", "b")
        wait_until(lambda: a.observe("b").worst_pong > 0, "an answer", SECONDS)
        yield a, suspicions, b


def await_suspicion(suspicions: Kinds, kind: tuple[str, str]) -> None:
    wait_until(lambda: suspicions.made, f"the suspicion {kind}", SECONDS)
    assert suspicions.made == [kind]


def test_a_process_that_is_stopped_is_suspected_of_silence_until_it_goes_on() -> None:
    with linked_with_a_process() as (_a, suspicions, b):
        os.kill(b.pid, signal.SIGSTOP)
        try:
            await_suspicion(suspicions, ("b", "silent"))
        finally:
            os.kill(b.pid, signal.SIGCONT)
        wait_until(lambda: suspicions.withdrawn, "the withdrawal", SECONDS)


def test_a_process_that_is_killed_is_suspected_of_refusing() -> None:
    with linked_with_a_process() as (_a, suspicions, b):
        b.kill()
        await_suspicion(suspicions, ("b", "refused"))


def test_a_process_that_is_killed_while_it_is_stopped_is_suspected_of_both() -> None:
    with linked_with_a_process() as (_a, suspicions, b):
        os.kill(b.pid, signal.SIGSTOP)
        await_suspicion(suspicions, ("b", "silent"))
        b.kill()
        wait_until(lambda: len(suspicions.made) == 2, "the second suspicion", SECONDS)
        assert suspicions.made[1] == ("b", "refused")


def test_a_line_that_swallows_all_is_replaced_and_nobody_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspicion, "PATIENCE_SECONDS", 3.0)
    with nodes("a", "b") as (a, b):
        wire = Wire(b)
        try:
            suspicions = Kinds()
            watched(a, suspicions)
            a.links.want("b", wire.address, "life-1")
            a.await_event("up", "b")
            wait_until(lambda: a.observe("b").worst_pong > 0, "an answer", SECONDS)
            wire.swallow()
            a.await_event("up", "b", times=2)
            assert suspicions.made == []
        finally:
            wire.close()


class Proxy:
    """The proxy of the chaos runs before two nodes: this process, and another one."""

    def __init__(self) -> None:
        self._commands, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chaos.proxy"], stdin=theirs.fileno(), cwd=ROOT
            )
        self._answers = self._commands.makefile("rb")

    def ask(self, do: str, **arguments: Any) -> None:
        command = json.dumps({"do": do, **arguments}).encode() + b"\n"
        self._commands.sendall(command)
        self._answers.readline()

    def stands_before(self, name: str, pid: int, address: str) -> str:
        """Return the address of the proxy that leads to a node."""
        own = free_address()
        self.ask("listen", node=name, pid=pid, routes=[(own, address, True)])
        return own

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._commands.close()
        self._process.wait(SECONDS)


def test_of_a_line_that_passes_one_direction_the_end_that_hears_nothing_suspects() -> None:
    with nodes("a") as (a,), Peer("b") as b, Proxy() as proxy:
        suspicions = Kinds()
        watched(a, suspicions)
        a.links.want("b", proxy.stands_before("b", b.pid, b.address), "life-1")
        b.meet({"a": proxy.stands_before("a", os.getpid(), a.address)})
        a.await_event("up", "b")
        wait_until(lambda: a.observe("b").worst_pong > 0, "an answer", SECONDS)
        proxy.ask("block", pairs=[("b", "a")])
        await_suspicion(suspicions, ("b", "silent"))
        assert b.report()[0] == []
        proxy.ask("open", pairs=[("b", "a")])
        wait_until(lambda: suspicions.withdrawn, "the withdrawal", SECONDS)


def test_what_is_known_of_nodes_can_be_asked_in_any_thread() -> None:
    with nodes("a", "b") as (a, b):
        monitor = watched(a, Kinds())
        assert monitor.heard() == {}
        link(a, b)
        wait_until(lambda: "b" in monitor.heard(), "a word of b", SECONDS)
        with a.paused():
            wait_until(lambda: monitor.lag() > 0.5, "its own lag", SECONDS)
            assert monitor.heard()["b"] > 0.5
