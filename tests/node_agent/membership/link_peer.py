"""A node with links and a peer monitor, as a process: it can be stopped, and killed.

    python -m tests.node_agent.membership.link_peer NAME

It says its address, reads those of the others, and then says whatever happens, as lines of JSON.
Another line has it say what it sees; it ends with its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from threading import Event
from typing import Any, Self

from allfold_agent.membership.peer_monitor import PeerMonitor
from allfold_core.survival.suspicion import SuspicionKind
from tests.node_agent.membership.link_nodes import Node
from tests.support.processes.forked import start_module


class Kinds:
    """The messages of a node to the orchestrator; as a reporter, and as lines of the program."""

    def __init__(self, *, says: bool = False) -> None:
        self.made: list[tuple[str, str]] = []
        self.withdrawn: list[tuple[str, str]] = []
        self.news = Event()
        self._says = says

    def suspect(
        self, node: str, incarnation: str, kind: SuspicionKind, since: float, lag: float
    ) -> None:
        assert incarnation == "life-1"
        self.made.append((node, kind))
        self._say(suspected=node, kind=kind, since=since, lag=lag)

    def withdraw(self, node: str, incarnation: str, kind: SuspicionKind) -> None:
        assert incarnation == "life-1"
        self.withdrawn.append((node, kind))
        self._say(withdrawn=node)

    def _say(self, **news: Any) -> None:
        self.news.set()
        if self._says:
            say(**news)


def say(**news: Any) -> None:
    with suppress(BrokenPipeError):
        print(json.dumps(news), flush=True)


def watched(node: Node, suspicions: Kinds) -> PeerMonitor:
    """Have a peer monitor watch the links of a node."""
    monitor = PeerMonitor(node.links, node.reactor, suspicions)

    def on_down(other: str, refused: bool) -> None:
        node.heard.events.append(("down", other, refused))
        if refused:
            monitor.look(other)

    node.heard.on_down = on_down  # type: ignore[method-assign, assignment]
    monitor.start()
    return monitor


class Peer:
    """The process, as its parent sees it.

    Args:
        quiet: its log is not wanted.
    """

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self.name = name
        its_input, writes = os.pipe()
        reads, its_output = os.pipe()
        self._says, self._hears = os.fdopen(writes, "w"), os.fdopen(reads)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        errors = os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2)
        self.process = start_module(
            name, [__name__, name], environment, stdin=its_input, output=its_output, errors=errors
        )
        for each in (its_input, its_output, errors):
            os.close(each)
        self.address: str = self.hear()["address"]

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> dict[str, Any]:
        """The next line."""
        news: dict[str, Any] = json.loads(self._hears.readline())
        return news

    def meet(self, addresses: dict[str, str]) -> None:
        """Have it want links to these nodes."""
        self._write(json.dumps(addresses))

    def report(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Its suspicions since it was heard last, and what it sees now."""
        self._write("report")
        suspicions: list[dict[str, Any]] = []
        while "seen" not in (news := self.hear()):
            suspicions.append(news)
        return suspicions, news

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)

    def _write(self, line: str) -> None:
        self._says.write(line + "\n")
        self._says.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.reap()
        self._says.close()
        self._hears.close()


def main(name: str) -> None:
    node = Node(name)
    say(address=node.address)
    addresses = json.loads(sys.stdin.readline())
    monitor = watched(node, Kinds(says=True))
    for other, address in addresses.items():
        node.links.want(other, address, "life-1")
    for _ in sys.stdin:
        seen = {other: node.observe(other) for other in addresses}
        say(
            seen={other: asdict(each) for other, each in seen.items()},
            up=[other for other in addresses if node.is_up(other)],
            heard=monitor.heard(),
            lag=monitor.lag(),
        )
    node.close()


if __name__ == "__main__":
    main(sys.argv[1])
