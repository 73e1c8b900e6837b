"""Links and a reactor on a clock of the test, for a peer monitor that sees what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from allfold_agent.membership.link_connection import Pings
from allfold_agent.membership.peer_monitor import PeerMonitor
from allfold_core.protocol.peer_link import Floor
from allfold_core.survival.suspicion import (
    LONGEST_PATIENCE_SECONDS,
    Awaited,
    Observation,
    RecentMaximum,
)
from tests.node_agent.membership.link_peer import Kinds

PING_SECONDS = 0.1
_STEP_SECONDS = 0.005
_START = 1000.0
_NEVER = float("-inf")


@dataclass
class SeenNode:
    """The visible state of another node.

    Attributes:
        answers: tells whether it answers at a time; it does so at once then, and pings itself.
    """

    answers: Callable[[float], bool] = lambda _: True
    incarnation: str = "life-1"
    last_heard: float = _NEVER
    refused: bool = False
    is_up: bool = True
    floors: Sequence[Floor] = ()
    pings: Pings = field(default_factory=Pings)
    unanswered: list[int] = field(default_factory=list)


class ScriptedLinks:
    """In place of the links, the reactor and the edges of an agent.

    Attributes:
        now: the time.
        nodes: the other nodes, by name.
        dialled: the nodes that were dialled again.
    """

    def __init__(self, *names: str) -> None:
        self.now = _START
        self.nodes = {name: SeenNode() for name in names}
        self.dialled: list[str] = []
        self.edges: dict[str, float] = {}
        self.awaited: list[Awaited] = []
        self._lateness = RecentMaximum(LONGEST_PATIENCE_SECONDS)
        self.suspicions = Kinds()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.later(0.0, self._ping)
        self.later(0.0, self._listen)
        links: Any = self
        self.monitor = PeerMonitor(
            links,
            links,
            self.suspicions,
            lambda node: self.edges.get(node, _NEVER),
            lambda: self.awaited,
            clock=lambda: self.now,
        )
        self.monitor.start()

    # Of the reactor

    def call(self, task: Callable[[], None]) -> None:
        task()

    def later(self, seconds: float, task: Callable[[], None]) -> None:
        heappush(self._timers, (self.now + seconds, next(self._numbers), task))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.now + seconds
        while self._timers[0][0] <= until:
            self.now = max(self.now, self._timers[0][0])
            heappop(self._timers)[2]()
        self.now = until

    def stall(self, seconds: float) -> None:
        """This node itself does nothing for a while; it decides before it reads what has come."""
        until, heard = self.now + seconds, set[str]()
        while self.now < until:
            heard |= self._answering()
            self.now += _STEP_SECONDS
        self.now = until
        self._lateness.note(self.now, seconds)
        for name in self.nodes:
            self.monitor.look(name)
        self._read(heard)

    # Of the links

    def wanted(self) -> list[tuple[str, str]]:
        return [(name, node.incarnation) for name, node in self.nodes.items()]

    def observe(self, name: str) -> Observation:
        node = self.nodes[name]
        return Observation(
            last_heard=max(node.last_heard, _START),
            unanswered=node.pings.unanswered,
            worst_pong=node.pings.worst_delay(self.now),
            own_lag=self.lag(),
            refused=node.refused,
        )

    def last_heard(self, name: str) -> float:
        return self.nodes[name].last_heard

    def floors(self, name: str) -> Sequence[Floor]:
        return self.nodes[name].floors

    def is_up(self, name: str) -> bool:
        return self.nodes[name].is_up

    def lag(self) -> float:
        return self._lateness.at(self.now)

    def dial_again(self, name: str) -> None:
        self.dialled.append(name)

    # What passes

    def _ping(self) -> None:
        for node in self.nodes.values():
            node.unanswered.append(node.pings.next(self.now))
        self.later(PING_SECONDS, self._ping)

    def _listen(self) -> None:
        self._read(self._answering())
        self.later(_STEP_SECONDS, self._listen)

    def _answering(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.answers(self.now)}

    def _read(self, names: set[str]) -> None:
        """Take what these nodes have sent."""
        for node in map(self.nodes.__getitem__, names):
            for number in node.unanswered:
                node.pings.note_answer(number, self.now)
            node.unanswered.clear()
            node.last_heard = self.now
